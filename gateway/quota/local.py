"""Limits in the memory of one process, used while Redis is away, with the same arithmetic as quota.lua, step by step.

A test sends the same requests to both and compares every answer. quota.lua explains the arithmetic.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from gateway.limits.kinds import BUDGET, ROLLING_BUDGET, TAKES_ONE, TOKEN_RATE, WINDOW_BY_LETTER
from gateway.limits.periods import period_end, period_start
from gateway.quota.demand import HEADROOM, Demand
from gateway.quota.limits import Limit, LimitState
from gateway.quota.rate_debt import GAUGE_WAIT_MS, State, basis_of, debt_of, decays_from, rate_wait
from gateway.quota.rolling import MAX_STEP, DailySpend, day_of

# Number of states above which an admission drops paid-off ones, and the number of states that it checks. An admission
# adds fewer states than it checks, so the checks keep up.
MAX_STATES, LOOKED_AT = 100_000, 64


class Acquired(msgspec.Struct, frozen=True, gc=False):
    """Answer to `acquire`. states: in the order of the limits."""

    allowed: bool
    granted: int
    states: list[LimitState]


class Grown(msgspec.Struct, frozen=True, gc=False):
    """Answer to `grow`. usable_tokens: the total of tokens that may be used.

    wait: if nothing was wanted or a part was denied, ms until the rates admit the same request again. field: the field
    of the exceeded limit, empty if nothing was denied.
    """

    usable_tokens: int
    wait: int
    field: str


class _Lease(msgspec.Struct):
    """Lease of a running request. held, charged: tokens of the rates that are held, and that have become debt."""

    tokens: int
    completion: int
    cost: int
    at: int
    limits: Sequence[Limit]
    held: int
    charged: int = 0


class _Room(msgspec.Struct):
    """Room of one limit for a request.

    left: requests, tokens or money. reserved: what would be left in addition if running requests used nothing more.
    used: the used amount of a gauge or budget. held: the part of a budget's that running requests only reserve. The
    other fields belong to rates, in microseconds. occupied: debt and held time. held_time: time of its held tokens.
    early: the time by which the debt is paid off earlier than at the limit's own rate. days: spending by day, for a
    rolling budget.
    """

    limit: Limit
    field: str
    left: int
    reserved: int = 0
    used: float = 0.0
    held: int = 0
    occupied: float = 0.0
    held_time: float = 0.0
    early: float = 0.0
    days: DailySpend | None = None


class LocalLimits:
    """Limits and leases of one process. `now` is in microseconds since 1970, by default the current time."""

    def __init__(self) -> None:
        # Tenant id and field -> state. Rate: (time, debt at that time, the limit by which the debt was computed);
        # budget: (first day of the period, amount spent in it, 0); count: (amount, 0, 0).
        self._states: OrderedDict[str, State] = OrderedDict()
        # Tenant id and field of a rolling budget -> its spending.
        self._days: OrderedDict[str, DailySpend] = OrderedDict()
        self._held: dict[str, int] = {}
        self._leases: dict[str, _Lease] = {}

    def acquire(self, limits: Sequence[Limit], demand: Demand, now: int | None = None) -> Acquired:
        """Reserve a request as the script's `acquire` does."""
        now = _now() if now is None else now
        rooms = [self._room(demand.tenant_id, limit, now) for limit in limits]
        again = self._leases.get(demand.tenant_id + demand.request_id)
        granted = _granted(demand, rooms) if again is None else again.completion
        prompt, price = demand.prompt_tokens, demand.price
        tokens, cost = prompt + granted, price.highest_cost(prompt, granted)
        at_first = prompt + min(demand.first_completion, granted)
        waits = [0] * len(rooms)
        if again is None:
            waits = [self._wait(room, demand.needed(room.limit, granted), now) for room in rooms]
        allowed = not any(waits)
        if allowed and again is None:
            for room in rooms:
                is_held = room.limit.letter in TOKEN_RATE
                self._take(room, at_first if is_held else room.limit.amount(tokens, cost), now)
            lease = _Lease(tokens, granted, cost, now, limits, at_first)
            self._leases[demand.tenant_id + demand.request_id] = lease
            if len(self._states) + len(self._days) > MAX_STATES:
                self._forget(now)
        states = [
            LimitState(room.left, wait, _reset(room, now), room.reserved)
            for room, wait in zip(rooms, waits, strict=True)
        ]
        return Acquired(allowed, granted, states)

    def peek(self, scope: str, limits: Sequence[Limit], now: int | None = None) -> list[tuple[int, int]]:
        """Return remaining and reset (ms) of each limit, as the script's `peek` does, without a change."""
        now = _now() if now is None else now
        before = {limit.field: self._states.get(scope + limit.field) for limit in limits}
        found = []
        for limit in limits:
            room = self._room(scope, limit, now)
            found.append((room.left, _reset(room, now)))
        for field, state in before.items():
            if state is None:
                self._states.pop(scope + field, None)
            else:
                self._states[scope + field] = state
        return found

    def settle(
        self, scope: str, request_id: str, tokens: int, cost: int, *, counts: bool, now: int | None = None
    ) -> bool:
        """Settle a request as the script's `settle` does. Return False if the request holds nothing."""
        lease = self._leases.pop(scope + request_id, None)
        if lease is None:
            return False
        now = _now() if now is None else now
        for limit in lease.limits:
            field, letter = scope + limit.field, limit.letter
            state = self._states.get(field)
            if letter in WINDOW_BY_LETTER:
                if letter in TOKEN_RATE:
                    self._hold(field, -lease.held)
                more = tokens - lease.charged if letter in TOKEN_RATE else int(counts) - 1
                self._settle_rate(limit, field, more, lease.at, now)
            elif letter in ROLLING_BUDGET:
                if (days := self._days.get(field)) is not None:
                    self._days[field] = days.at(now).plus(cost - lease.cost, day_of(lease.at))
                    self._hold(field, -lease.cost)
            elif letter in BUDGET:
                if state is not None and state[0] == _period(letter, lease.at):
                    self._states[field] = (state[0], max(0, state[1] + cost - lease.cost), 0)
                    self._hold(field, -lease.cost)
            elif state is not None:
                left = state[0] - limit.amount(lease.tokens, 0)
                if left > 0:
                    self._states[field] = (left, 0, 0)
                else:
                    del self._states[field]
        return True

    def grow(
        self, scope: str, request_id: str, used: int, wanted: int, expected: int, now: int | None = None
    ) -> Grown | None:
        """Grow a hold as the script's `grow` does. Return None if the request holds nothing."""
        lease = self._leases.get(scope + request_id)
        if lease is None:
            return None
        now = _now() if now is None else now
        more = max(0, used - lease.charged)
        asks_for_wait = wanted == 0
        granted = wanted = max(0, min(wanted, lease.tokens - lease.charged - more))
        at_first = lease.tokens - lease.completion + min(expected, lease.completion)
        longest, blocking = 0, ""
        for limit in lease.limits:
            field, letter = scope + limit.field, limit.letter
            if letter not in TOKEN_RATE:
                continue
            state = self._states.get(field)
            basis = basis_of(state, limit)
            window, unit = WINDOW_BY_LETTER[letter], WINDOW_BY_LETTER[letter] / basis
            debt = debt_of(state, now) + more * unit
            if more > 0:
                self._states[field] = (decays_from(state, now), debt, basis)
            others = max(0, self._held.get(field, 0) - lease.held) * unit
            granted = min(granted, math.floor((window - debt - others) / unit + 0.001))
            excess = debt + others + (wanted - 0.001) * unit - window
            if excess > 0 and wanted > 0:
                this = 1 + self._wait_again(scope, lease, limit, at_first, now)
                if this > longest:
                    longest, blocking = this, limit.field
        rates = [limit for limit in lease.limits if limit.letter in WINDOW_BY_LETTER]
        waits = (self._wait_again(scope, lease, limit, at_first, now) for limit in rates)
        wait = max(waits, default=0) if asks_for_wait or blocking else 0
        granted = max(granted, lease.held - more, 0)
        for limit in lease.limits:
            if limit.letter in TOKEN_RATE:
                self._hold(scope + limit.field, granted - lease.held)
        lease.charged += more
        lease.held = granted
        return Grown(lease.charged + granted, wait, blocking)

    def _wait_again(self, scope: str, lease: _Lease, limit: Limit, at_first: int, now: int) -> int:
        """Return the ms until a limit admits the request again if it ends now, as the script's `wait_again` does."""
        field, letter = scope + limit.field, limit.letter
        state = self._states.get(field)
        basis = basis_of(state, limit)
        window, unit = WINDOW_BY_LETTER[letter], WINDOW_BY_LETTER[letter] / basis
        amount, others = 1.0, 0.0
        if letter in TOKEN_RATE:
            amount = min(lease.tokens, at_first + math.floor(basis / HEADROOM), basis)
            others = max(0, self._held.get(field, 0) - lease.held) * unit
        debt, needed = debt_of(state, now), (amount - 0.001) * unit
        if debt + others + needed <= window:
            return 0
        return rate_wait(window, debt, others, needed, decays_from(state, now) - now)

    def _room(self, scope: str, limit: Limit, now: int) -> _Room:
        """Return the room of a limit before the request."""
        field, letter = scope + limit.field, limit.letter
        if length := ROLLING_BUDGET.get(letter):
            days = self._days.get(field, DailySpend(day_of(now), (0,) * length)).at(now)
            return self._room_of_budget(limit, field, days.total, days)
        if letter in BUDGET:
            return self._room_of_budget(limit, field, int(_spent(self._states.get(field), letter, now)))
        if letter not in WINDOW_BY_LETTER:
            state = self._states.get(field)
            used = state[0] if state else 0
            return _Room(limit, field, max(0, limit.value - int(used)), used=used)
        window, unit = WINDOW_BY_LETTER[letter], WINDOW_BY_LETTER[letter] / limit.value
        debt, early = self._under_limit(field, limit, now)
        held = self._held.get(field, 0) * unit
        left = max(0, math.floor((window - (debt + held)) / unit + 0.001))
        reserved = max(0, math.floor((window - debt) / unit + 0.001)) - left if held > 0 else 0
        return _Room(limit, field, left, reserved, occupied=debt + held, held_time=held, early=early)

    def _room_of_budget(self, limit: Limit, field: str, used: int, days: DailySpend | None = None) -> _Room:
        left, held = max(0, limit.value - used), min(used, self._held.get(field, 0))
        return _Room(limit, field, left, max(0, limit.value - used + held) - left, used=used, held=held, days=days)

    def _under_limit(self, field: str, limit: Limit, now: int) -> tuple[float, float]:
        """Mirror the script's `under_limit`. Return the debt, and the time by which it is paid off earlier."""
        state, window = self._states.get(field), WINDOW_BY_LETTER[limit.letter]
        basis, debt = basis_of(state, limit), debt_of(state, now)
        of_limit = debt * (basis / limit.value)
        if basis < limit.value or (basis > limit.value and of_limit <= window):
            self._states[field] = (decays_from(state, now), of_limit, limit.value)
        elif (state is None and field in self._held) or (state is not None and state[0] - now > MAX_STEP):
            self._states[field] = (now, debt, basis)
        return of_limit, max(0, of_limit - window) * (1 - limit.value / basis)

    def _wait(self, room: _Room, amount: int, now: int) -> int:
        """Return the ms until `amount` fits, 0 if it fits now."""
        limit = room.limit
        if amount <= room.left:
            return 0
        if limit.letter in BUDGET and amount <= room.left + room.reserved:
            return GAUGE_WAIT_MS
        if room.days is not None:
            return room.days.wait(limit.value, amount, room.held, now)
        if limit.letter not in WINDOW_BY_LETTER:
            return _left_ms(limit.letter, now) if limit.letter in BUDGET else GAUGE_WAIT_MS
        window = WINDOW_BY_LETTER[limit.letter]
        needed = (amount - 0.001) * (window / limit.value)
        later = decays_from(self._states.get(room.field), now) - now - room.early
        return rate_wait(window, room.occupied - room.held_time, room.held_time, needed, later)

    def _take(self, room: _Room, amount: int, now: int) -> None:
        """Take `amount` from a limit and update its room."""
        limit, field = room.limit, room.field
        room.left -= amount
        if room.days is not None:
            room.days = self._days[field] = room.days.plus(amount, day_of(now))
            self._hold(field, amount)
            return
        if limit.letter in BUDGET:
            state, number = self._states.get(field), _period(limit.letter, now)
            if state is None or state[0] != number:
                self._held.pop(field, None)
            self._states[field] = (number, room.used + amount, 0)
            self._hold(field, amount)
            return
        if limit.letter not in WINDOW_BY_LETTER:
            self._states[field] = (room.used + amount, 0, 0)
            return
        room.occupied += amount * (WINDOW_BY_LETTER[limit.letter] / limit.value)
        if limit.letter in TOKEN_RATE:
            self._hold(field, amount)
        else:
            self._states[field] = (decays_from(self._states.get(field), now), room.occupied, limit.value)

    def _settle_rate(self, limit: Limit, field: str, more: int, admitted_at: int, now: int) -> None:
        """Add `more` requests or tokens to a rate's debt. If negative, refund the part that is not paid off yet."""
        state = self._states.get(field)
        basis = basis_of(state, limit)
        added = more * (WINDOW_BY_LETTER[limit.letter] / basis)
        if added < 0:
            speed = max(1, limit.value / basis)
            added = -max(0, -added - speed * max(0, decays_from(state, now) - admitted_at))
        debt = max(0, debt_of(state, now) + added)
        if state is not None or debt > 0:
            self._states[field] = (decays_from(state, now), debt, basis)

    def _hold(self, field: str, more: int) -> None:
        left = self._held.get(field, 0) + more
        if left > 0:
            self._held[field] = left
        else:
            self._held.pop(field, None)

    def _forget(self, now: int) -> None:
        """Check the LOOKED_AT states that were checked least recently, and drop the ones that are paid off."""
        for _ in range(min(LOOKED_AT, len(self._states))):
            field, state = self._states.popitem(last=False)
            letter = field[-1]
            if (letter in WINDOW_BY_LETTER and debt_of(state, now) == 0) or (
                letter in BUDGET and state[0] < _period(letter, now)
            ):
                if letter in BUDGET:
                    self._held.pop(field, None)
                continue
            self._states[field] = state
        for _ in range(min(LOOKED_AT, len(self._days))):
            field, days = self._days.popitem(last=False)
            if days.at(now).total:
                self._days[field] = days
            else:
                self._held.pop(field, None)


def _now() -> int:
    return time.time_ns() // 1000


def _granted(demand: Demand, rooms: Sequence[_Room]) -> int:
    """Return the completion tokens that the limits have room for, or the fewest that suffice."""
    granted, prompt = demand.completion, demand.prompt_tokens
    for room in rooms:
        letter = room.limit.letter
        if letter in BUDGET:
            if demand.price.output > 0:
                money = min(room.left, 8_000_000_000) * 1_000_000 - prompt * demand.price.highest_input
                granted = min(granted, money // demand.price.output)
        elif letter not in TAKES_ONE and not (
            letter in TOKEN_RATE and prompt + demand.first_completion + room.limit.value // HEADROOM <= room.left
        ):
            granted = min(granted, room.left - prompt)
    return granted if granted == demand.completion else max(demand.least, granted // demand.step * demand.step)


def _reset(room: _Room, now: int) -> int:
    """Return the ms until the limit is fully available again if nothing more is used."""
    if room.days is not None:
        return room.days.reset(now)
    if room.limit.letter in WINDOW_BY_LETTER:
        return math.ceil((room.occupied - room.early) / 1000)
    return _left_ms(room.limit.letter, now) if room.limit.letter in BUDGET else 0


def _spent(state: State | None, letter: str, now: int) -> float:
    return state[1] if state is not None and state[0] == _period(letter, now) else 0


def _period(letter: str, now: int) -> int:
    """Return the first day of a budget's period, which identifies the period."""
    return period_start(letter, _moment(now)).toordinal()


def _left_ms(letter: str, now: int) -> int:
    """Return the milliseconds until a budget's next period."""
    return int(period_end(letter, _moment(now)).timestamp()) * 1000 - now // 1000


def _moment(now: int) -> datetime:
    return datetime.fromtimestamp(now // 1_000_000, UTC)
