"""Waiting requests of a queue: ordered by priority with ageing, then by fair share, then by deadline within a tenant.

A priority's level improves by one for each PRIORITY_S in which its requests waited and none was admitted. So no
priority starves another for ever: beside an endless flow of requests of priority 0, a request of priority p is admitted
after `PRIORITY_S * (p + 1)` of waiting, and the tenants of p take turns by their service. Ageing counts by priority and
not by request, because old requests of a flood would otherwise pass the fresh ones of a less served tenant of the same
priority. A time-out does not reset the clock, so that a client that tries again gets its turn; the clock stops while no
request of the priority waits.

The requests of one tenant and priority are a line, sorted by deadline; the lines of a priority are sorted by their
tenants' counters. Each change of a counter moves the tenant's lines, so that a choice reads the ends of sorted lists.
"""

import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from wire.deadlines import PRIORITY_S

# Priority of the gateway's own checks, after all tenants' (0 to 9). It never ages.
CHECKS_PRIORITY = 10


class Waiter(Protocol):
    """Fields of a request that order it. They do not change while it waits. arrival_number: unique, and ascending."""

    tenant_id: str
    priority: int
    deadline: float
    arrival_number: int
    arrived_at: float


W = TypeVar("W", bound=Waiter)


def everybody(_waiter: Waiter) -> bool:
    return True


class Waiting(Generic[W]):
    """Ordered set of waiting requests. counter: returns a tenant's service; `reorder` is called after its changes."""

    def __init__(self, counter: Callable[[str], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = counter
        self._clock = clock
        # By tenant, then by priority.
        self._lines: dict[str, dict[int, _Line[W]]] = {}
        self._ranks: dict[int, _Rank[W]] = {}
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def __contains__(self, waiter: W) -> bool:
        line = self._lines.get(waiter.tenant_id, {}).get(waiter.priority)
        return line is not None and waiter.arrival_number in line.arrivals

    def __iter__(self) -> Iterator[W]:
        return (
            waiter for lines in self._lines.values() for line in lines.values() for waiter in line.arrivals.values()
        )

    def add(self, waiter: W) -> None:
        tenant_id, priority = waiter.tenant_id, waiter.priority
        rank = self._ranks.get(priority)
        if rank is None:
            rank = self._ranks[priority] = _Rank(priority)
        lines = self._lines.setdefault(tenant_id, {})
        line = lines.get(priority)
        if line is None:
            line = lines[priority] = _Line(tenant_id)
        line.add(waiter)
        rank.place(line, self._counter(tenant_id))
        rank.count(1, self._clock())
        self._number += 1

    def remove(self, waiter: W, *, admitted: bool = False) -> None:
        """Remove a waiting request. admitted: whether it is served, so that its priority ages anew."""
        tenant_id, priority = waiter.tenant_id, waiter.priority
        rank, lines = self._ranks[priority], self._lines[tenant_id]
        line = lines[priority]
        line.remove(waiter)
        if line.arrivals:
            rank.place(line, self._counter(tenant_id))
        else:
            rank.take_out(line)
            del lines[priority]
            if not lines:
                del self._lines[tenant_id]
        now = self._clock()
        if admitted:
            rank.since = now
        rank.count(-1, now)
        self._number -= 1

    def reorder(self, tenant_id: str | None) -> None:
        """Apply a change of a tenant's counter; None: of all counters."""
        for each in list(self._lines) if tenant_id is None else [tenant_id]:
            for priority, line in self._lines.get(each, {}).items():
                self._ranks[priority].place(line, self._counter(each))

    def first(self, may_enter: Callable[[W], bool] = everybody) -> W | None:
        """Return the request to admit next: in the line whose turn it is, the earliest deadline. None if nobody waits.

        may_enter: returns whether a request that is the first of its line may be chosen.
        """
        now, found = self._clock(), []
        for rank in self._ranks.values():
            turn = next((each for each in rank.order if may_enter(each[-1].first)), None)
            if turn is not None:
                found.append((rank.level(now), *turn))
        return min(found)[-1].first if found else None

    def last(self) -> W:
        """Return the request that would be admitted last. Raises ValueError without any."""
        now = self._clock()
        return max((rank.level(now), *rank.order[-1]) for rank in self._ranks.values() if rank.order)[-1].sorted[-1][-1]

    def oldest(self) -> W | None:
        """Return the request that has waited longest."""
        lines = (line for lines in self._lines.values() for line in lines.values())
        return min((line.oldest for line in lines), key=lambda waiter: waiter.arrived_at, default=None)


class _Line(Generic[W]):
    """Waiting requests of one tenant and priority.

    sorted: by deadline, then arrival number. arrivals: in order of arrival, by that number. key: its position among the
    lines of its priority: its tenant's counter, and the arrival number of its oldest request.
    """

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.sorted: list[tuple[float, int, W]] = []
        self.arrivals: OrderedDict[int, W] = OrderedDict()
        self.key: tuple[float, int] | None = None

    @property
    def first(self) -> W:
        return self.sorted[0][-1]

    @property
    def oldest(self) -> W:
        return next(iter(self.arrivals.values()))

    def add(self, waiter: W) -> None:
        insort(self.sorted, (waiter.deadline, waiter.arrival_number, waiter))
        self.arrivals[waiter.arrival_number] = waiter

    def remove(self, waiter: W) -> None:
        del self.arrivals[waiter.arrival_number]
        del self.sorted[bisect_left(self.sorted, (waiter.deadline, waiter.arrival_number))]


class _Rank(Generic[W]):
    """Waiting lines of one priority, sorted by `key`.

    number: number of its waiting requests.
    since: time from which its wait counts while requests wait: its last admission, or `waited` seconds before the first
        request came.
    waited: seconds of its last wait, if that ended without an admission.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.order: list[tuple[float, int, _Line[W]]] = []
        self.number = 0
        self.since = self.waited = 0.0

    def place(self, line: _Line[W], counter: float) -> None:
        """Move the line to its position. counter: its tenant's."""
        key = counter, line.oldest.arrival_number
        if key != line.key:
            self.take_out(line)
            line.key = key
            insort(self.order, (*key, line))

    def take_out(self, line: _Line[W]) -> None:
        if line.key is not None:
            del self.order[bisect_left(self.order, line.key)]
            line.key = None

    def count(self, change: int, now: float) -> None:
        """Count requests that came or left. The clock runs while there are any."""
        if not self.number:
            self.since = now - self.waited
        self.number += change
        self.waited = now - self.since

    def level(self, now: float) -> int:
        """Return the priority after ageing."""
        if self.priority >= CHECKS_PRIORITY:
            return self.priority
        return self.priority - int((now - self.since) / PRIORITY_S)
