"""Queue of requests while the engines are full: bounded, ordered by priority and fair share.

Lower priority numbers go first, with ageing (`waiting.py`). Among equals, the tenant with the least service per weight
goes first (`service_counters.py`), so engines that do not distinguish tenants are shared fairly too. Within a tenant,
the request with the earliest deadline goes first (`wire/deadlines.py`). A full queue refuses the request that would be
served last, whether new or waiting.

A tenant below its share of the places does not wait: it is admitted beyond the engines' capacity, and until the excess
is gone, free places go only to tenants below their share. Otherwise a tenant that arrives behind another's long answers
would wait for their ends. This holds for engines that order tenants themselves; others never get more than they run.

Foreign servers run sequences in order of arrival, so a request takes a place there for each of its sequences. A
tenant's requests of several sequences leave half of the places free: their sequences end together, so a tenant behind
them would wait for a whole answer. If too few places are free for the request whose turn it is, only tenants below
their share of the places pass it. After PASS_SECONDS an engine is kept free for it, and they pass only to the other
engines. A request that is too large for every available engine is admitted at once, so that it fails without a wait.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.errors import Overloaded
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.service_meter import ServiceMeter
from gateway.fleet.queueing.waiting import Waiting

MAX_RETRY_SECONDS = 60
# Time for which others pass to any engine a request whose turn it is but for which too few places are free. Neighbours
# below their share could otherwise keep their places, one by one, until it times out.
PASS_SECONDS = 5.0


class TenantPlaces(NamedTuple):
    """A tenant's requests, waiting or on the engines.

    tenant: its name. service: its counter of received service. share: number of places that the tenant gets without a
    wait. inside: number of places that its requests take. waiting: number of its waiting requests. waited: longest wait
    of these so far, in seconds.
    """

    tenant: str
    weight: float
    service: float
    share: int
    inside: int
    waiting: int
    waited: float


def _ignore(_: float) -> None:
    pass


def _nothing() -> None:
    pass


class Room(NamedTuple):
    """Room of an engine that does not order tenants. free: its free places. most: maximum sequences of a request."""

    free: int
    most: float


class Capacity(NamedTuple):
    """Capacity of all engines together.

    places_for_process: places on the engines that other processes leave to this one. If engines order tenants, a tenant
        below its share is admitted beyond them.
    ordered_places: places of the engines that order tenants fairly, including those that other processes use.
    unordered_places: places of the other engines, including those that other processes use.
    max_request_now: maximum sequences of a request that some engine takes now.
    max_request: maximum sequences of a request that some engine takes at all.
    rooms: room of each engine; empty if an engine orders tenants (`ordered_places` above 0).
    """

    places_for_process: int
    ordered_places: int
    unordered_places: int = 0
    max_request_now: float = math.inf
    max_request: float = math.inf
    rooms: tuple[Room, ...] = ()

    @property
    def shared(self) -> int:
        """Return the number of places that the tenants of all processes share."""
        return self.ordered_places or self.unordered_places

    def size(self, sequences: int) -> int:
        """Return the number of places of a request: one if an engine that orders tenants can take it, none if no engine
        can.
        """
        if sequences > self.max_request:
            return 0
        return 1 if self.ordered_places else sequences

    def fits(self, sequences: int, inside: int) -> bool:
        """Return whether a request fits beside those that take `inside` places, or would fail without a place."""
        size = self.size(sequences)
        return not size or (inside + size <= self.places_for_process and size <= max(1, self.max_request_now))

    def leaves_half(self, sequences: int, inside: int) -> bool:
        """Return whether a request leaves half of this process's places free of its tenant.

        Return True for a single sequence, for a tenant without requests, and if an engine orders tenants. inside:
        number of places that the tenant's requests take.
        """
        size = 0 if self.ordered_places or sequences == 1 else self.size(sequences)
        return not size or not inside or inside + size <= self.places_for_process // 2

    def room_beside(self, sequences: int) -> float:
        """Return the maximum sequences of a request that some engine takes now, without the engine that is kept free
        for a request of `sequences`.
        """
        kept = kept_free(self.rooms, sequences)
        return max((min(room) for number, room in enumerate(self.rooms) if number != kept), default=0)


def kept_free(rooms: Sequence[Room], sequences: int) -> int | None:
    """Return the index of the engine that is kept free for a request: of those that take it, the one with most room.

    Others fill the other engines, so it remains the one with most room.
    """
    fitting = [number for number, room in enumerate(rooms) if room.most >= sequences]
    return max(fitting, key=lambda number: rooms[number].free, default=None)


@dataclass(slots=True, eq=False)
class Place:
    """The place of a request, waiting or with an engine.

    priority: the tenant's; lower numbers go first. meter: charges the request's service to the tenant. tenant_name:
    shown to operators. sequences: number of its sequences. size: number of places that it takes since its admission.
    on_wait: called if the request has to wait. deadline: orders the tenant's own requests, in seconds of
    `time.monotonic`. passed_since: the time since which others pass it; None before. passes: set if this request was
    admitted ahead of one for which an engine is kept free: that request's number of sequences, so that routing avoids
    the engine. 0: none.
    """

    tenant_id: str
    weight: float
    priority: int
    meter: ServiceMeter
    tenant_name: str = ""
    sequences: int = 1
    size: int = 1
    on_wait: Callable[[], None] = _nothing
    arrival_number: int = 0
    deadline: float = 0.0
    arrived_at: float = field(default_factory=time.monotonic)
    entered: float | None = None
    passed_since: float | None = None
    passes: int = 0
    # True: admitted; False: refused.
    turn: "asyncio.Future[bool]" = field(init=False)


class RequestQueue:
    """Admission of requests to the engines.

    capacity: returns the present capacity, or None while no engine is available. Requests are then admitted at once, so
    that they fail without a wait.
    """

    def __init__(
        self, capacity: Callable[[], Capacity | None], counters: ServiceCounters, max_waiting: int, max_seconds: float
    ) -> None:
        self._capacity = capacity
        self._counters = counters
        self._max_waiting = max_waiting
        self._max_seconds = max_seconds
        self._waiting: Waiting[Place] = Waiting(counters.counter)
        counters.watch(self._waiting.reorder)
        # Admitted requests that have not ended, and by tenant the number of places of those that still hold any.
        self._admitted: set[Place] = set()
        self._inside: Counter[str] = Counter()
        self._num_inside = 0
        # Number of admitted requests that hold their places.
        self._num_holding = 0
        self._arrivals = 0
        self._seconds_inside = 1.0
        # Called with the wait of each admitted request, in seconds.
        self.observe_wait: Callable[[float], None] = _ignore

    @property
    def inside(self) -> int:
        return self._num_inside

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def enter(self, place: Place) -> AsyncIterator[None]:
        """Wait for admission, then hold the place until the block ends or `free` is called. Raises Overloaded.

        From the admission on, the whole prompt is expected service. `count_service` and the end of the block replace
        this expectation by the tokens that engines have computed.
        """
        self._counters.enter(place.tenant_id, place.weight)
        try:
            await self._wait(place)
            place.entered = time.monotonic()
            self.observe_wait(place.entered - place.arrived_at)
            self._admitted.add(place)
            try:
                yield
            finally:
                self._admitted.remove(place)
                self._step_out(place)
        finally:
            place.meter.end()
            self._counters.leave(place.tenant_id)
            self.admit()

    def free(self, place: Place) -> None:
        """Free the place before the request ends, because its engine has finished its part."""
        self._step_out(place)
        self.admit()

    async def enter_again(self, place: Place) -> None:
        """Wait for admission once more, after `free` and within the block of `enter`. Raises Overloaded."""
        place.arrived_at = time.monotonic()
        await self._wait(place)
        place.entered = time.monotonic()

    def count_service(self) -> None:
        """Add to the tenants' service what engines have computed since the last call, by their reports."""
        for place in self._admitted:
            place.meter.update()

    def admit(self) -> None:
        """Admit as many waiting requests as there is room for. Call it also when the engines may have more room.

        Each prompt is counted before the next request is chosen (VTC, algorithm 2); otherwise one tenant would get all
        places that become free together.
        """
        while self._waiting:
            capacity = self._capacity()
            place = self._next(capacity)
            if place is None:
                return
            if self._end_wait(place, True):
                self._take_places(place, capacity)

    @property
    def longest_wait(self) -> float:
        """Return the longest wait of the waiting requests, in seconds."""
        oldest = self._waiting.oldest()
        return 0.0 if oldest is None else time.monotonic() - oldest.arrived_at

    def tenants(self) -> dict[str, TenantPlaces]:
        """Return the tenants with requests in the queue or on the engines, by id."""
        places = capacity.shared if (capacity := self._capacity()) is not None else 0
        waiting: dict[str, list[Place]] = {}
        for place in self._waiting:
            waiting.setdefault(place.tenant_id, []).append(place)
        now = time.monotonic()
        found = {place.tenant_id: place for place in (*self._admitted, *self._waiting)}
        return {
            tenant_id: TenantPlaces(
                tenant=place.tenant_name,
                weight=place.weight,
                service=self._counters.received(tenant_id),
                share=self._share(tenant_id, places),
                inside=self._inside[tenant_id],
                waiting=len(waiting.get(tenant_id, ())),
                waited=now - min((other.arrived_at for other in waiting.get(tenant_id, ())), default=now),
            )
            for tenant_id, place in found.items()
        }

    def _next(self, capacity: Capacity | None) -> Place | None:
        """Return the waiting request that is admitted next, None if there is room for none."""
        if capacity is None:
            return self._waiting.first()

        def leaves_half(place: Place) -> bool:
            return capacity.leaves_half(place.sequences, self._inside[place.tenant_id])

        first = self._waiting.first(leaves_half)
        if first is None or capacity.fits(first.sequences, self._num_inside):
            return first
        # Every share is at least one place, so many tenants could exceed the places without this limit.
        if self._num_inside >= capacity.places_for_process + capacity.ordered_places:
            return None
        keeps_engine = not capacity.ordered_places and self._was_passed_for_long(first)
        room = capacity.room_beside(first.sequences) if keeps_engine else math.inf

        def is_below_share(place: Place) -> bool:
            fits = capacity.ordered_places > 0 or capacity.fits(place.sequences, self._num_inside)
            if not fits or not leaves_half(place):
                return False
            share, size = self._share(place.tenant_id, capacity.shared), capacity.size(place.sequences)
            return size <= room and self._inside[place.tenant_id] + size <= share

        found = self._waiting.first(is_below_share)
        if found is not None and keeps_engine:
            found.passes = first.sequences
        return found

    @staticmethod
    def _was_passed_for_long(first: Place) -> bool:
        """Return whether others have passed the request whose turn it is for PASS_SECONDS.

        The time counts from its turn, not from its arrival: a tenant's hundred waiting requests would otherwise keep
        an engine free one after another.
        """
        now = time.monotonic()
        if first.passed_since is None:
            first.passed_since = now
        return now - first.passed_since >= PASS_SECONDS

    def _share(self, tenant_id: str, places: int) -> int:
        """Return the number of places that the tenant gets without a wait: at least one."""
        return max(1, int(places * self._counters.share(tenant_id)))

    def _take_places(self, place: Place, capacity: Capacity | None) -> None:
        place.size = 1 if capacity is None else capacity.size(place.sequences)
        self._inside[place.tenant_id] += place.size
        self._num_inside += place.size
        self._num_holding += 1
        place.meter.admit(self._counters, place.tenant_id)

    def _step_out(self, place: Place) -> None:
        """Stop counting the place. Only the first call has an effect."""
        if place.entered is not None:
            self._leave(place)
            self._seconds_inside += 0.1 * (time.monotonic() - place.entered - self._seconds_inside)
            place.entered = None

    def _leave(self, place: Place) -> None:
        self._num_inside -= place.size
        self._num_holding -= 1
        self._inside[place.tenant_id] -= place.size
        if not self._inside[place.tenant_id]:
            del self._inside[place.tenant_id]

    async def _wait(self, place: Place) -> None:
        if place.sequences > 1 and (capacity := self._capacity()) is not None and not capacity.size(place.sequences):
            # It is not counted as an admission of its priority, which would then age anew.
            self._take_places(place, capacity)
            return
        self._arrivals += 1
        place.arrival_number = self._arrivals
        place.turn = asyncio.get_running_loop().create_future()
        self._waiting.add(place)
        self.admit()
        if len(self._waiting) > self._max_waiting:
            self._end_wait(self._waiting.last(), False)
        if not place.turn.done():
            place.on_wait()
        try:
            if not place.turn.done():
                async with asyncio.timeout(self._max_seconds):
                    await place.turn
            admitted = place.turn.result()
        except BaseException as error:
            if place in self._waiting:
                self._waiting.remove(place)
            elif place.turn.done() and not place.turn.cancelled() and place.turn.result():
                # The request was admitted in the same iteration in which its wait ended.
                self._leave(place)
            if isinstance(error, TimeoutError):
                raise self._refusal(f"this request waited {self._max_seconds:g} s for one") from None
            raise
        if not admitted:
            raise self._refusal("the queue for them is full")

    def _end_wait(self, place: Place, admitted: bool) -> bool:
        """End a place's wait. Returns False if its request is already being cancelled."""
        self._waiting.remove(place, admitted=admitted and not place.turn.done())
        if place.turn.done():
            return False
        place.turn.set_result(admitted)
        return True

    def _refusal(self, reason: str) -> Overloaded:
        """Build the refusal. Its Retry-After is the estimated time until the present requests have ended."""
        turns = (len(self._waiting) + 1) / max(1, self._num_holding)
        seconds = math.ceil(self._seconds_inside * turns)
        return Overloaded(
            f"Every engine is busy, and {reason}; try again shortly.",
            retry_after=min(max(1, seconds), MAX_RETRY_SECONDS),
        )
