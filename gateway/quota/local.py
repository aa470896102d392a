"""Limits in the memory of one process, used while Redis is away, with the same arithmetic as quota.lua, step by step.

A test sends the same requests to both and compares every answer. quota.lua explains the arithmetic.
"""

import calendar
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from gateway.quota.limits import SINGLE, Limit
from gateway.records.prices import Price

# Window of each kind of rate, in microseconds.
WINDOW = {"r": 60_000_000, "t": 60_000_000, "d": 86_400_000_000, "m": 60_000_000}
# Token rates: a running request holds the tokens that it may still use, and used tokens become debt.
STAGED = frozenset("td")
# A new request leaves 1 / HEADROOM of a token rate's limit to the growth of running ones.
HEADROOM = 4
GAUGE_WAIT_MS = 1000
# If the clock is set back by more than this (microseconds), debts decay again at once.
MAX_STEP = 3_600_000_000
# Number of states beyond which those that are paid off are dropped.
MAX_STATES = 100_000


class Answer(msgspec.Struct, frozen=True, gc=False):
    """Answer to `acquire`. states: remaining, wait (ms) and reset (ms) of each limit, in the order of the limits."""

    allowed: bool
    granted: int
    states: list[tuple[int, int, int]]


class Grown(msgspec.Struct, frozen=True, gc=False):
    """Answer to `grow`. allowed: the total of tokens that may be used. wait: ms until the denied part could be granted.

    field: the field of the exceeded limit, empty if everything was granted.
    """

    allowed: int
    wait: int
    field: str


class _Lease(msgspec.Struct):
    """Lease of a running request. held, charged: tokens of the rates that are held, and that have become debt."""

    tokens: int
    completion: int
    cost: int
    month: int
    at: int
    limits: Sequence[Limit]
    held: int
    charged: int = 0


class LocalLimits:
    """Limits and leases of one process. `now` is in microseconds since 1970, by default the current time."""

    def __init__(self) -> None:
        # Tenant id and field -> state: (time, debt at that time) of a rate, (month, amount spent in it) of a budget,
        # (amount, 0) of a count.
        self._states: dict[str, tuple[float, float]] = {}
        self._held: dict[str, int] = {}
        self._leases: dict[str, _Lease] = {}

    def acquire(
        self,
        scope: str,
        request_id: str,
        limits: Sequence[Limit],
        prompt: int,
        completion: int,
        step: int,
        price: Price,
        now: int | None = None,
        expected: int | None = None,
    ) -> Answer:
        """Do the script's `acquire`. scope: the tenant's id. expected: the whole completion by default."""
        now = _now() if now is None else now
        expected = completion if expected is None else expected
        month, month_left_ms = _month(now)
        used: list[float] = []
        held: list[float] = []
        room: list[int] = []
        granted = completion
        for limit in limits:
            kind, state = limit.kind, self._states.get(scope + limit.field)
            if kind in WINDOW:
                unit = WINDOW[kind] / limit.value
                if state is not None and state[0] - now > MAX_STEP:
                    state = self._states[scope + limit.field] = (now, state[1])
                held.append(self._held.get(scope + limit.field, 0) * unit)
                used.append(_debt(state, now) + held[-1])
                room.append(max(0, math.floor((WINDOW[kind] - used[-1]) / unit + 0.001)))
            else:
                held.append(0)
                used.append(_spent(state, month) if kind == "b" else state[0] if state else 0)
                room.append(max(0, limit.value - int(used[-1])))
            if kind == "b":
                if price.output > 0:
                    money = min(room[-1], 8_000_000_000) * 1_000_000 - prompt * price.highest_input
                    granted = min(granted, money // price.output)
            elif kind not in SINGLE and not (
                kind in STAGED and prompt + expected + limit.value // HEADROOM <= room[-1]
            ):
                granted = min(granted, room[-1] - prompt)

        again = self._leases.get(scope + request_id)
        if again is not None:
            granted = again.completion
        elif granted < completion:
            granted = max(min(step, completion), granted // step * step)
        tokens = prompt + granted
        cost = -(-(prompt * price.highest_input + granted * price.output) // 1_000_000)
        at_first = prompt + min(expected, granted)

        waits = []
        for i, limit in enumerate(limits):
            amount = limit.amount(tokens, cost)
            if limit.kind in STAGED:
                amount = min(tokens, at_first + limit.value // HEADROOM)
            if amount <= room[i] or again is not None:
                waits.append(0)
            elif limit.kind in WINDOW:
                window = WINDOW[limit.kind]
                needed = (amount - 0.001) * (window / limit.value)
                if held[i] + needed > window:
                    waits.append(GAUGE_WAIT_MS)
                    continue
                paused = _decays_from(self._states.get(scope + limit.field), now) - now
                waits.append(max(1, math.ceil((used[i] + needed - window + paused) / 1000)))
            else:
                waits.append(month_left_ms if limit.kind == "b" else GAUGE_WAIT_MS)

        allowed = not any(waits)
        if allowed and again is None:
            for i, limit in enumerate(limits):
                field = scope + limit.field
                amount = at_first if limit.kind in STAGED else limit.amount(tokens, cost)
                room[i] -= amount
                if limit.kind in WINDOW:
                    used[i] += amount * (WINDOW[limit.kind] / limit.value)
                    if limit.kind in STAGED:
                        self._hold(field, amount)
                        continue
                    state = (_decays_from(self._states.get(field), now), used[i])
                elif limit.kind == "b":
                    state = (month, used[i] + amount)
                else:
                    state = (used[i] + amount, 0)
                self._states[field] = state
            self._leases[scope + request_id] = _Lease(tokens, granted, cost, month, now, limits, at_first)
            if len(self._states) > MAX_STATES:
                self._forget(now, month)

        states = []
        for i, limit in enumerate(limits):
            reset = month_left_ms if limit.kind == "b" else 0
            if limit.kind in WINDOW:
                reset = math.ceil(used[i] / 1000)
            states.append((room[i], waits[i], reset))
        return Answer(allowed, granted, states)

    def settle(
        self, scope: str, request_id: str, tokens: int, cost: int, *, counts: bool, now: int | None = None
    ) -> bool:
        """Do the script's `settle`. Return False if the request holds nothing."""
        lease = self._leases.pop(scope + request_id, None)
        if lease is None:
            return False
        now = _now() if now is None else now
        for limit in lease.limits:
            field, kind = scope + limit.field, limit.kind
            state = self._states.get(field)
            if kind in WINDOW:
                debt, unit = _debt(state, now), WINDOW[kind] / limit.value
                decays_from = _decays_from(state, now)
                if kind in STAGED:
                    self._hold(field, -lease.held)
                    more = (tokens - lease.charged) * unit
                else:
                    more = 0 if counts else -unit
                # Refund only the part of an excess that is not paid off yet.
                debt += more if more >= 0 else -max(0, -more - max(0, decays_from - lease.at))
                if state is not None or debt > 0:
                    self._states[field] = (decays_from, max(0, debt))
            elif kind == "b":
                if state is not None and state[0] == lease.month:
                    self._states[field] = (lease.month, max(0, state[1] + cost - lease.cost))
            elif state is not None:
                left = state[0] - limit.amount(lease.tokens, 0)
                if left > 0:
                    self._states[field] = (left, 0)
                else:
                    del self._states[field]
        return True

    def grow(self, scope: str, request_id: str, used: int, wanted: int, now: int | None = None) -> Grown | None:
        """Do the script's `grow`. Return None if the request holds nothing."""
        lease = self._leases.get(scope + request_id)
        if lease is None:
            return None
        now = _now() if now is None else now
        more = max(0, used - lease.charged)
        granted = wanted = max(0, min(wanted, lease.tokens - lease.charged - more))
        wait, blocking = 0, ""
        for limit in lease.limits:
            field, kind = scope + limit.field, limit.kind
            if kind not in STAGED:
                continue
            window, unit = WINDOW[kind], WINDOW[kind] / limit.value
            state = self._states.get(field)
            debt = _debt(state, now) + more * unit
            if more > 0:
                self._states[field] = (_decays_from(state, now), debt)
            others = max(0, self._held.get(field, 0) - lease.held) * unit
            granted = min(granted, math.floor((window - debt - others) / unit + 0.001))
            excess = debt + others + (wanted - 0.001) * unit - window
            if excess > 0 and wanted > 0:
                this = GAUGE_WAIT_MS
                if excess <= debt:
                    this = max(1, math.ceil((excess + _decays_from(state, now) - now) / 1000))
                if this > wait:
                    wait, blocking = this, limit.field
        granted = max(granted, lease.held - more, 0)
        for limit in lease.limits:
            if limit.kind in STAGED:
                self._hold(scope + limit.field, granted - lease.held)
        lease.charged += more
        lease.held = granted
        return Grown(lease.charged + granted, wait, blocking)

    def _hold(self, field: str, more: int) -> None:
        left = self._held.get(field, 0) + more
        if left > 0:
            self._held[field] = left
        else:
            self._held.pop(field, None)

    def _forget(self, now: int, month: int) -> None:
        for field, state in list(self._states.items()):
            kind = field[-1]
            if (kind in WINDOW and _debt(state, now) == 0) or (kind == "b" and state[0] < month):
                del self._states[field]


def _now() -> int:
    return time.time_ns() // 1000


def _debt(state: tuple[float, float] | None, now: int) -> float:
    if state is None:
        return 0
    at, debt = state
    return max(0, debt - max(0, now - at))


def _decays_from(state: tuple[float, float] | None, now: int) -> float:
    """Return the time from which a rate's new state decays: now, or later if the clock was set back."""
    at = now if state is None else state[0]
    return now if at - now > MAX_STEP else max(at, now)


def _spent(state: tuple[float, float] | None, month: int) -> float:
    return state[1] if state is not None and state[0] == month else 0


def _month(now: int) -> tuple[int, int]:
    """Return the calendar month as a number, and the milliseconds until the next month."""
    today = datetime.fromtimestamp(now // 1_000_000, UTC)
    days = calendar.monthrange(today.year, today.month)[1]
    next_month = datetime(today.year, today.month, 1, tzinfo=UTC).timestamp() + days * 86400
    return today.year * 12 + today.month, int(next_month) * 1000 - now // 1000
