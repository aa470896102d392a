"""Debt of rates and the waits until it leaves room: the arithmetic of quota.lua, for its twin in Python."""

import math

from gateway.quota.limits import Limit
from gateway.quota.rolling import MAX_STEP

# Wait for room that running requests hold, whose end is unknown: a retry is reasonable after a second.
GAUGE_WAIT_MS = 1000
# Longest wait in which running requests are expected to return nothing to a rate.
MAX_DECAY_MS = 60_000
# Rate: (time in microseconds, debt at that time, the limit by which the debt was computed).
State = tuple[float, float, float]


def debt_of(state: State | None, now: int) -> float:
    if state is None:
        return 0
    return max(0, state[1] - max(0, now - state[0]))


def basis_of(state: State | None, limit: Limit) -> float:
    """Return the limit by which a rate's debt was computed."""
    return limit.value if state is None else state[2]


def decays_from(state: State | None, now: int) -> float:
    """Return the time from which a rate's new state decays: now, or later if the clock was set back."""
    at = now if state is None else state[0]
    return now if at - now > MAX_STEP else max(at, now)


def rate_wait(window: float, debt: float, held: float, needed: float, later: float) -> int:
    """Return the ms until a rate has room for `needed` microseconds, as the script's `rate_wait` does."""
    excess = debt + needed - window
    decay = math.ceil((excess + held + later) / 1000)
    if held + needed <= window and decay <= MAX_DECAY_MS:
        return max(1, decay)
    return max(GAUGE_WAIT_MS, math.ceil((excess + later) / 1000) if excess > 0 else 0)
