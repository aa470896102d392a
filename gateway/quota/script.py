"""Text of the quota script: tables of the kinds of limits, constants of its Python twin, then quota.lua."""

from collections.abc import Iterable
from importlib import resources

from gateway.limits.kinds import (
    BACKFILLED,
    BUDGET,
    GAUGE,
    PERIOD_BY_LETTER,
    ROLLING_BUDGET,
    TAKES_ONE,
    TOKEN_RATE,
    WINDOW_BY_LETTER,
)
from gateway.quota.demand import HEADROOM
from gateway.quota.rate_debt import GAUGE_WAIT_MS, MAX_DECAY_MS
from gateway.quota.rolling import MAX_STEP

SETS = {"TAKES_ONE": TAKES_ONE, "GAUGE": GAUGE, "TOKEN_RATE": TOKEN_RATE, "BUDGET": BUDGET, "BACKFILLED": BACKFILLED}
CONSTANTS = {
    "HEADROOM": HEADROOM,
    "GAUGE_WAIT_MS": GAUGE_WAIT_MS,
    "MAX_DECAY_MS": MAX_DECAY_MS,
    "MAX_STEP": MAX_STEP,
}


def source() -> str:
    """Return the script's text. Its digest differs between releases with different kinds, so both can run at once."""
    tables = {name: _flags(kinds) for name, kinds in SETS.items()}
    tables["WINDOW"] = ", ".join(f"{letter} = {window}" for letter, window in WINDOW_BY_LETTER.items())
    tables["ROLLING"] = ", ".join(f"{letter} = {days}" for letter, days in ROLLING_BUDGET.items())
    tables["PERIOD"] = ", ".join(f"{letter} = '{period}'" for letter, period in PERIOD_BY_LETTER.items())
    lines = "".join(f"local {name} = {{{content}}}\n" for name, content in tables.items())
    lines += "".join(f"local {name} = {number}\n" for name, number in CONSTANTS.items())
    return lines + resources.files("gateway.quota").joinpath("quota.lua").read_text("utf-8")


def _flags(kinds: Iterable[str]) -> str:
    return ", ".join(f"{letter} = true" for letter in sorted(kinds))
