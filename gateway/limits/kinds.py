"""Kinds of limits, as data. The API, the command line, the dashboard, the script and its twin are derived from them.

A new kind is an entry of KINDS, and its row and flag in docs/reference.md.
"""

from typing import Literal

import msgspec

MINUTE, DAY, WEEK, MONTH, ROLLING = "minute", "day", "week", "month", "30 days"
# Length of the rolling period in days (UTC), of which today is the last.
ROLLING_DAYS = 30
# Windows of rates, in microseconds.
WINDOWS = {MINUTE: 60_000_000, DAY: 86_400_000_000}

BudgetPeriod = Literal["day", "week", "month", "30 days"]
# Periods of budgets: the letters of their kinds, and their words.
BUDGET_PERIODS: dict[BudgetPeriod, tuple[str, str]] = {
    "day": ("j", "per day"),
    "week": ("w", "per week from Monday"),
    "month": ("b", "per calendar month"),
    "30 days": ("l", "of the last 30 days, today included"),
}


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Kind of limit.

    name: in the API, the database and the command line.
    letter: the last letter of its field in Redis; a letter is never reused for another kind.
    takes: the amount of each use: one, the request's tokens or cost, or an upload's bytes.
    period: the period of a rate or budget; None for a gauge, which limits a present number or amount.
    charged: the event that uses it; "store" kinds are checked by `gateway/records/adapters/limits.py` alone; "alert"
        kinds refuse nothing, and `gateway/alerts` reports when a tenant's spending reaches them.
    unit: the words after the value in messages; "{s}" is the plural ending.
    largest: the highest value that the API accepts.
    default: value for a new tenant.
    heading: on the dashboard.
    title: in sentences of the dashboard, if it differs from the name.
    """

    name: str
    letter: str = ""
    takes: Literal["one", "tokens", "cost", "bytes"] = "one"
    period: Literal["minute", "day", "week", "month", "30 days"] | None = None
    charged: Literal["request", "upload", "store", "alert"] = "request"
    unit: str
    help: str
    largest: int
    default: int | None = None
    heading: str = ""
    title: str = ""

    @property
    def window(self) -> int | None:
        """Return the window of a rate in microseconds; None if the kind is not a rate."""
        return None if self.is_budget else WINDOWS.get(self.period or "")

    @property
    def is_budget(self) -> bool:
        """Return whether the kind limits money: in a day, a week from Monday, a month, or the last 30 days (UTC)."""
        return self.takes == "cost"

    @property
    def takes_one(self) -> bool:
        """Return whether each use takes one, however large it is."""
        return self.takes == "one"

    @property
    def is_gauge(self) -> bool:
        """Return whether a use counts only while it runs."""
        return self.period is None

    @property
    def is_token_rate(self) -> bool:
        """Return whether the kind is a token rate: running requests hold tokens, and used tokens become debt.

        The bytes of an upload are held and charged like the tokens of a request.
        """
        return self.takes in ("tokens", "bytes") and self.window is not None

    @property
    def is_backfilled(self) -> bool:
        """Return whether past usage is backfilled from the ledger after Redis has lost it."""
        return self.charged == "request" and self.period in (DAY, WEEK, MONTH, ROLLING)

    @property
    def limit_class(self) -> str:
        """Return the class of the kind: the `type` of its refusals, and its name in `LORAPLEX_QUOTA_FALLBACK`."""
        if self.is_gauge:
            return "concurrency"
        return {"one": "requests", "tokens": "tokens", "cost": "budget", "bytes": "requests"}[self.takes]


def _budget(period: BudgetPeriod, *, is_soft: bool = False) -> Kind:
    """Return the budget of a period. is_soft: spending it causes an event only."""
    letter, words = BUDGET_PERIODS[period]
    title = "Soft budget" if is_soft else "Budget"
    return Kind(
        name=f"{title.lower()} per {period}".replace(" ", "_"),
        letter="" if is_soft else letter,
        takes="cost",
        period=period,
        charged="alert" if is_soft else "request",
        unit=f"of {title.lower()} per {period}",
        help=f"{title} {words} (UTC)",
        largest=10**15,
        heading=f"{title}/{period}",
    )


KINDS = (
    Kind(
        name="requests_per_minute",
        letter="r",
        period="minute",
        unit="request{s} per minute",
        help="Requests per minute",
        largest=10_000_000,
        default=600,
        heading="Requests/min",
    ),
    Kind(
        name="tokens_per_minute",
        letter="t",
        takes="tokens",
        period="minute",
        unit="token{s} per minute",
        help="Prompt and output tokens per minute",
        largest=10_000_000_000,
        default=200_000,
        heading="Tokens/min",
    ),
    Kind(
        name="tokens_per_day",
        letter="d",
        takes="tokens",
        period="day",
        unit="token{s} per day",
        help="Prompt and output tokens per day",
        largest=10_000_000_000,
        heading="Tokens/day",
    ),
    Kind(
        name="requests_per_day",
        letter="q",
        period="day",
        unit="request{s} per day",
        help="Requests per day",
        largest=1_000_000_000,
        heading="Requests/day",
    ),
    Kind(
        name="max_concurrent",
        letter="c",
        unit="concurrent request{s}",
        help="Concurrent requests",
        largest=100_000,
        default=32,
        heading="Concurrent",
        title="concurrent requests",
    ),
    Kind(
        name="max_concurrent_tokens",
        letter="o",
        takes="tokens",
        unit="concurrent token{s}",
        help="Prompt and output tokens of all concurrent requests",
        largest=10_000_000_000,
        heading="Concurrent tokens",
        title="concurrent tokens",
    ),
    *(_budget(period) for period in BUDGET_PERIODS),
    *(_budget(period, is_soft=True) for period in BUDGET_PERIODS),
    Kind(
        name="adapter_changes_per_minute",
        letter="m",
        period="minute",
        charged="upload",
        unit="adapter change{s} per minute",
        help="Uploads and deletions of adapters per minute",
        largest=10_000_000,
        default=60,
    ),
    Kind(
        name="upload_bytes_per_minute",
        letter="y",
        takes="bytes",
        period="minute",
        charged="upload",
        unit="uploaded byte{s} per minute",
        help="Bytes of adapter uploads per minute",
        largest=10**13,
        # The largest adapter that a gateway accepts by default, in parts: each byte arrives and is joined.
        default=4 << 30,
    ),
    Kind(
        name="max_concurrent_uploads",
        letter="u",
        charged="upload",
        unit="concurrent upload{s}",
        help="Concurrent adapter uploads",
        largest=100_000,
        default=4,
        title="concurrent uploads",
    ),
    Kind(
        name="max_adapters",
        charged="store",
        unit="adapter{s}",
        help="Number of adapter names",
        largest=100_000,
        default=1000,
    ),
    Kind(
        name="max_adapter_bytes",
        takes="bytes",
        charged="store",
        unit="byte{s} of adapters",
        help="Total bytes of adapter tensors, including all versions on record",
        largest=10**15,
        default=64 << 30,
    ),
)

# Limits on the requests of a tenant, a key or a model; limits on a tenant's own adapters, and those of them that the
# script counts; soft budgets of a tenant.
REQUEST_KINDS = tuple(kind for kind in KINDS if kind.charged == "request")
ADAPTER_KINDS = tuple(kind for kind in KINDS if kind.charged in ("upload", "store"))
UPLOAD_KINDS = tuple(kind for kind in KINDS if kind.charged == "upload")
ALERT_KINDS = tuple(kind for kind in KINDS if kind.charged == "alert")
# Kinds that the script counts, by their letters.
BY_LETTER = {kind.letter: kind for kind in KINDS if kind.letter}

# Letters of the counted kinds by property, for the script and its twin; other code asks `Limit.kind`.
# WINDOW_BY_LETTER maps letters to microseconds.
WINDOW_BY_LETTER = {letter: kind.window for letter, kind in BY_LETTER.items() if kind.window is not None}
TAKES_ONE = frozenset(letter for letter, kind in BY_LETTER.items() if kind.takes_one)
GAUGE = frozenset(letter for letter, kind in BY_LETTER.items() if kind.is_gauge)
TOKEN_RATE = frozenset(letter for letter, kind in BY_LETTER.items() if kind.is_token_rate)
BUDGET = frozenset(letter for letter, kind in BY_LETTER.items() if kind.is_budget)
# Counted budgets, the period of each by letter, and the names of all budgets, soft ones included.
BUDGET_KINDS = tuple(kind for kind in KINDS if kind.is_budget and kind.letter)
PERIOD_BY_LETTER = {letter: str(kind.period) for letter, kind in BY_LETTER.items() if kind.is_budget}
BUDGET_NAMES = tuple(kind.name for kind in KINDS if kind.is_budget)
# Days of the rolling budgets by letter. A budget of a period, and a soft one, by the period's name.
ROLLING_BUDGET = {letter: ROLLING_DAYS for letter, period in PERIOD_BY_LETTER.items() if period == ROLLING}
SOFT_BUDGET = {str(kind.period): kind.name for kind in ALERT_KINDS}
BACKFILLED = frozenset(letter for letter, kind in BY_LETTER.items() if kind.is_backfilled)
