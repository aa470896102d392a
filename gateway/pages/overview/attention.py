"""The list "Needs attention" of the overview: each entry has a sentence and a link to the act."""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

from markupsafe import Markup
from msgspec import Struct

from gateway.billing.ledger import Ledger
from gateway.errors import Unavailable
from gateway.limits.periods import PERIOD_WORDS
from gateway.pages.frame.strip import Level, Status, verb_of
from gateway.pages.widgets.limit_titles import limit_title
from gateway.records.attention import BUDGET_PART, EXPIRY, Attention, Concerns

# Lifetime of the cached records, which all viewers share.
FRESH_SECONDS = 30.0
LONG_WAIT, MANY_ROWS = 5.0, 1000
# Tenants that an entry names, and engines with an entry of their own.
MAX_TENANTS, MAX_ENGINES = 3, 6


STATE = ("Show the state", "/admin/settings?tab=state")
ENGINES = ("Show the engines", "/admin/engines")
# Pages with all records of a kind.
BUDGETS = ("Show the tenants", f"/admin/tenants?over_budget={BUDGET_PART}&suspended=false")
REFUSALS = ("Why 429", "/admin/refusals?period=1h")
KEYS = ("Show the keys", "/admin/keys?state=expiring")
REJECTED = ("Show the adapters", "/admin/adapters?state=rejected")
TARGETS = ("Show the targets", "/admin/alerts?tab=targets&state=failing")
# Acts for faulty parts; the others have STATE.
PART_ACTS = {"engines": ENGINES, "tokenizer": ("Show the base models", "/admin/engines/bases")}


class Act(Struct, frozen=True, kw_only=True):
    """Link to the page that helps."""

    title: str
    url: str


class Need(Struct, frozen=True, kw_only=True):
    """Entry of the list as the API shows it."""

    level: Level
    text: str
    act: Act


class NeedList(Struct, frozen=True, kw_only=True):
    """List "Needs attention", the worst first."""

    object: Literal["list"] = "list"
    data: list[Need]


class Entry(NamedTuple):
    """Entry of the list. act: the link's title, and its URL."""

    level: Level
    text: str | Markup
    act: tuple[str, str]

    def described(self) -> Need:
        """Return the entry for JSON, with plain text."""
        text = self.text.striptags() if isinstance(self.text, Markup) else self.text
        title, url = self.act
        return Need(level=self.level, text=text, act=Act(title=title, url=url))


class Needs:
    """Reader of the list. money: shows an amount."""

    def __init__(self, records: Attention, ledger: Ledger, money: Callable[[int], Any]) -> None:
        self._records = records
        self._ledger = ledger
        self._money = money
        self._concerns = Concerns([], [], [], [], [], [])
        self._read_at = 0.0

    async def entries(self, status: Status, *, may_bill: bool = True) -> list[Entry]:
        """Return the entries, the worst first. Records in them are older while the database is unavailable.

        may_bill: whether the reader may change budgets; otherwise the act for a budget is the tenant's page.
        """
        if time.monotonic() - self._read_at > FRESH_SECONDS or not self._read_at:
            # Set before the read, so that only one viewer reads; the others get the last result.
            self._read_at = time.monotonic()
            try:
                self._concerns = await self._records.read()
            except Unavailable:
                self._read_at = 0.0
        found = [*self._of_memory(status), *self._of_deaths(status), *self._of_records(may_bill)]
        return sorted(found, key=lambda entry: ("bad", "warn", "good").index(entry.level))

    def _of_memory(self, status: Status) -> list[Entry]:
        text: str | Markup
        found = [
            Entry(
                part.level,
                Markup("{} {} faulty: {}.").format(part.title, verb_of(part.title), part.text.rstrip(".")),
                PART_ACTS.get(part.name, STATE),
            )
            for part in status.faults
        ]
        away = sorted((each for each in status.engines if each.level != "good"), key=lambda each: each.level != "bad")
        for engine in away[:MAX_ENGINES]:
            text = Markup("Engine {} is {}: {}.").format(engine.url, engine.state, engine.reason.rstrip("."))
            found.append(Entry(engine.level, text, _engine_act(engine.url)))
        if others := away[MAX_ENGINES:]:
            text = f"{counted(len(others), 'more engine')} cannot be used, or not fully."
            found.append(Entry(others[0].level, text, ENGINES))
        if (longest := status.waits.oldest) is not None and longest > LONG_WAIT:
            text = f"{status.waiting:,} requests wait, the longest for {longest:.0f} s."
            found.append(Entry("warn", text, ENGINES))
        if self._ledger.waiting > MANY_ROWS:
            text = f"The ledger is behind: {self._ledger.waiting:,} usage rows wait for the database."
            found.append(Entry("warn", text, STATE))
        if self._ledger.rejected:
            text = f"The database refused {self._ledger.rejected:,} usage rows; they are missing in usage and cost."
            found.append(Entry("bad", text, ("Show the rows", "/admin/settings?tab=rejected")))
        return found

    def _of_deaths(self, status: Status) -> list[Entry]:
        engines = {engine.url: engine for engine in status.engines}
        found = []
        for died in self._concerns.deaths:
            engine = engines.get(died.engine)
            times = "once" if died.deaths == 1 else f"{died.deaths:,} times"
            last = "" if died.deaths == 1 else "last "
            text = f"Engine {died.engine} died {times} in the last hour, {last}at {died.last_at:%H:%M:%S} UTC"
            if engine is not None and engine.state == "up" and engine.since >= died.last_at:
                text += f"; it runs again since {engine.since:%H:%M:%S} UTC"
            act = ENGINES if engine is None else _engine_act(died.engine)
            found.append(Entry("warn", f"{text}.", act))
        return found

    def _of_records(self, may_bill: bool) -> list[Entry]:
        found: list[Entry] = []
        text: str | Markup
        for budget in self._concerns.budgets:
            level: Level = "bad" if budget.spent >= budget.budget else "warn"
            text = Markup("{} spent {} of {} {}, {:.0f} %.").format(
                *(budget.tenant, self._money(budget.spent), self._money(budget.budget), PERIOD_WORDS[budget.period]),
                100 * budget.spent / budget.budget,
            )
            page = f"/admin/tenants/{budget.tenant}"
            act = ("Change the budget", f"{page}/budget") if may_bill else ("Show the limits", f"{page}?tab=limits")
            found.append(Entry(level, text, act))
        for refused in self._concerns.refused:
            tenants, more = refused.tenants[:MAX_TENANTS], len(refused.tenants) - MAX_TENANTS
            named = f"{', '.join(tenants)}{f' and {more:,} more' if more > 0 else ''}"
            number = "1 request" if refused.requests == 1 else f"{refused.requests:,} requests"
            text = f"The limit {limit_title(refused.limit_name)} refused {number} of {named} in the last hour."
            where = {"period": "1h", "limit_name": refused.limit_name}
            found.append(Entry("warn", text, ("Why 429", f"/admin/refusals?{urlencode(where)}")))
        for key in self._concerns.keys:
            owner = f"of {key.tenant}" if key.tenant else "of an operator"
            label = key.label or key.id
            others = f", and {key.more:,} more of this tenant in the next {EXPIRY.days} days" if key.more else ""
            text = f"Key {label} {owner} expires on {key.expires_at:%Y-%m-%d %H:%M} UTC{others}."
            where = {"tenant": key.tenant} if key.tenant else {}
            found.append(Entry("warn", text, ("Rotate the key", f"/admin/keys?{urlencode(where)}")))
        for version in self._concerns.rejected:
            others = f", and {version.more:,} more of this tenant in the last day" if version.more else ""
            text = (
                f"Version {version.version} of {version.tenant}/{version.name} was rejected at {version.at:%H:%M} "
                f"UTC{others}."
            )
            where = {"tenant": version.tenant} | ({} if version.more else {"q": version.name})
            found.append(Entry("warn", text, ("Read the report", f"/admin/adapters?{urlencode(where)}")))
        for target in self._concerns.targets:
            of = f" of {target.tenant}" if target.tenant else ""
            tries = f"{target.failures:,} attempts failed, the last with: {target.error.rstrip('.')}"
            text = f"Events do not reach the target {target.name}{of}: {tries}."
            found.append(Entry("warn", text, ("Show the target", f"/admin/alerts/{target.name}")))
        return found + self._more()

    def _more(self) -> list[Entry]:
        """Return an entry for each kind of record that has more than are listed, with a link to all of them."""
        more = self._concerns.more
        entries = (
            (
                more.budgets,
                f"{counted(more.budgets, 'more tenant')} spent at least {100 * BUDGET_PART:.0f} % of a budget.",
                BUDGETS,
            ),
            (more.refused, f"{counted(more.refused, 'more limit')} refused requests in the last hour.", REFUSALS),
            (more.keys, f"Keys of {counted(more.keys, 'more owner')} expire in the next {EXPIRY.days} days.", KEYS),
            (more.rejected, f"{counted(more.rejected, 'more tenant')} had uploads rejected in the last day.", REJECTED),
            (more.deaths, f"{counted(more.deaths, 'more engine')} died in the last hour.", ENGINES),
            (more.targets, f"Events do not reach {counted(more.targets, 'more target')}.", TARGETS),
        )
        return [Entry("warn", text, act) for number, text, act in entries if number]


def _engine_act(url: str) -> tuple[str, str]:
    return "Show the engine", f"/admin/engines/one?{urlencode({'url': url})}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
