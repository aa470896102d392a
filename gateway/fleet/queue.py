"""Queue of requests while the engines are full: bounded, ordered by priority and fair share.

Lower priority numbers go first. Among equals, the tenant with the least service per weight goes first, counted in
tokens (virtual token counters, as in engine/scheduling/fair_share.py). So engines that cannot tell tenants apart are
shared fairly too. When the queue is full, the request that would be served last is refused, whether new or waiting.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.errors import Overloaded

# The same as the engine's: a prompt token takes a share of a batch, a generated token takes a step.
PREFILL_COST = 1.0
DECODE_COST = 2.0
LONGEST_RETRY_SECONDS = 60


@dataclass(slots=True, eq=False)
class Place:
    """The place of a request, waiting or with an engine. Lower priorities go first. tokens: of its prompt."""

    tenant: str
    weight: float
    priority: int
    tokens: int
    arrival: int = 0
    entered: float | None = None
    # True: admitted; False: refused.
    turn: "asyncio.Future[bool]" = field(init=False)


class Gate:
    """Admission to the engines. capacity: called each time; returns how many requests may be inside, None for all."""

    def __init__(self, capacity: Callable[[], int | None], max_waiting: int, max_seconds: float) -> None:
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._max_seconds = max_seconds
        self._inside = 0
        self._waiting: list[Place] = []
        # Tokens served per weight, by tenant. Cleared when no request is present: fairness needs no history then.
        self._served: dict[str, float] = {}
        self._present: Counter[str] = Counter()
        self._arrivals = 0
        self._seconds_inside = 1.0

    @property
    def inside(self) -> int:
        return self._inside

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def enter(self, place: Place, completion_tokens: Callable[[], int]) -> AsyncIterator[None]:
        """Wait for the place and hold it for the block or until `free`; then charge the tenant `completion_tokens()`.

        Raises Overloaded.
        """
        self._arrive(place)
        try:
            if self._waiting or not self._has_room:
                await self._wait(place)
            else:
                self._inside += 1
            self._charge(place, place.tokens * PREFILL_COST)
            place.entered = time.monotonic()
            try:
                yield
            finally:
                self._charge(place, completion_tokens() * DECODE_COST)
                self._step_out(place)
        finally:
            self._leave(place)
            self.admit()

    def free(self, place: Place) -> None:
        """Free the place before the request ends, because its engine has finished its part."""
        self._step_out(place)
        self.admit()

    def _step_out(self, place: Place) -> None:
        """Stop counting the place. Only the first call has an effect."""
        if place.entered is not None:
            self._inside -= 1
            self._seconds_inside += 0.1 * (time.monotonic() - place.entered - self._seconds_inside)
            place.entered = None

    def admit(self) -> None:
        """Admit as many waiting requests as there is room for. Call it also when the engines' room may have grown."""
        while self._waiting and self._has_room:
            place = min(self._waiting, key=self._order)
            if self._end_wait(place, True):
                self._inside += 1

    @property
    def _has_room(self) -> bool:
        capacity = self._capacity()
        return capacity is None or self._inside < capacity

    async def _wait(self, place: Place) -> None:
        place.turn = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        if len(self._waiting) > self._max_waiting:
            self._end_wait(max(self._waiting, key=self._order), False)
        try:
            async with asyncio.timeout(self._max_seconds):
                admitted = await place.turn
        except BaseException as error:
            if place in self._waiting:
                self._waiting.remove(place)
            elif place.turn.done() and not place.turn.cancelled() and place.turn.result():
                # The request was admitted in the same iteration in which its wait ended.
                self._inside -= 1
            if isinstance(error, TimeoutError):
                raise self._refusal(f"this request waited {self._max_seconds:g} s for one") from None
            raise
        if not admitted:
            raise self._refusal("the queue for them is full")

    def _end_wait(self, place: Place, admitted: bool) -> bool:
        """End a place's wait. Returns False if its request is already being cancelled."""
        self._waiting.remove(place)
        if place.turn.done():
            return False
        place.turn.set_result(admitted)
        return True

    def _arrive(self, place: Place) -> None:
        """Add the place. An idle tenant's counter rises to the least of those present, so idling earns no credit."""
        tenant = place.tenant
        if tenant not in self._present:
            least = min((self._served[other] for other in self._present), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._present[tenant] += 1
        self._arrivals += 1
        place.arrival = self._arrivals

    def _leave(self, place: Place) -> None:
        self._present[place.tenant] -= 1
        if not self._present[place.tenant]:
            del self._present[place.tenant]
        if not self._present:
            self._served.clear()

    def _charge(self, place: Place, cost: float) -> None:
        self._served[place.tenant] += cost / place.weight

    def _order(self, place: Place) -> tuple[int, float, int]:
        return (place.priority, self._served[place.tenant], place.arrival)

    def _refusal(self, reason: str) -> Overloaded:
        """Build the refusal. Its Retry-After is an estimate of when the present requests are done."""
        turns = (len(self._waiting) + 1) / max(1, self._inside)
        seconds = math.ceil(self._seconds_inside * turns)
        return Overloaded(
            f"Every engine is busy, and {reason}; try again shortly.",
            retry_after=min(max(1, seconds), LONGEST_RETRY_SECONDS),
        )
