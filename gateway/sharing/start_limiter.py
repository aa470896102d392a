"""Limit of the requests that begin in one iteration of the event loop; owners take turns, each with one request.

Without it, 500 requests that arrive at once take their first steps in one iteration, and nothing else runs for 100 ms.
The same holds wherever many requests wait for one event: the look-up of their key, or the end of their tenant's delay.

A request of another client needs about a dozen iterations between its arrival and its answer, so each millisecond that
one owner takes of every iteration delays it by a dozen.
"""

import asyncio
from collections import OrderedDict

# The first steps of a request (middlewares, key, body) take 0.2 ms, those up to a refusal 1 ms.
REQUESTS_PER_ITERATION = 8
# Maximum time until the end of an owner's rests, however many requests were charged at once.
MAX_REST_SECONDS = 0.5
# Resolution of libuv's clock and timers, and the shortest rest. A timer for less would fire in each iteration of the
# event loop until the clock advances.
CLOCK_SECONDS = 0.001


class StartLimiter:
    """Count of the requests that begin in each iteration of the running event loop.

    per_iteration: their maximum number.
    """

    def __init__(self, per_iteration: int = REQUESTS_PER_ITERATION) -> None:
        self._per_iteration = per_iteration
        # Owners whose request has begun in this iteration, and those whose request was released for the next one.
        self._begun: set[str] = set()
        self._released: set[str] = set()
        self._is_counting = False
        # Each owner's queue is a dict, from which a client that leaves is removed at once.
        self._waiting: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()
        # Owner -> time (of the event loop) at which its next request may begin.
        self._rests: dict[str, float] = {}

    async def begin(self, owner: str) -> None:
        """Wait for an iteration in which a request of the owner may begin."""
        # A released request may run on either side of the `_next` that moves it to `_begun`, so both sets are checked.
        if owner not in self._waiting and all(self._may_begin(owner, these) for these in (self._begun, self._released)):
            self._begun.add(owner)
            self._count()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(owner, turn)
            raise

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None:
            queue.pop(turn, None)
            if not queue:
                del self._waiting[owner]

    def rest(self, owner: str, seconds: float) -> None:
        """Let no request of the owner begin for `seconds` after its earlier rests, but at most MAX_REST_SECONDS."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if owner not in self._rests:
            loop.call_later(CLOCK_SECONDS, self._end_rest, owner)
        self._rests[owner] = min(max(now, self._rests.get(owner, now)) + seconds, now + MAX_REST_SECONDS)

    def _end_rest(self, owner: str) -> None:
        loop = asyncio.get_running_loop()
        if (left := self._rests[owner] - loop.time()) >= CLOCK_SECONDS:
            loop.call_later(left, self._end_rest, owner)
            return
        del self._rests[owner]
        if owner in self._waiting and not self._is_counting:
            self._next()

    def _may_begin(self, owner: str, begun: set[str]) -> bool:
        return len(begun) < self._per_iteration and owner not in begun and owner not in self._rests

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Start an iteration, and release waiting requests of the owners in turn; they begin in the next iteration."""
        self._is_counting = False
        self._begun, self._released = self._released, set()
        for owner in [owner for owner in self._waiting if owner not in self._rests]:
            if len(self._released) >= self._per_iteration:
                break
            queue = self._waiting.pop(owner)
            while queue and self._may_begin(owner, self._released):
                turn, _ = queue.popitem(last=False)
                if not turn.done():
                    self._released.add(owner)
                    turn.set_result(None)
            if queue:
                # Last in the next iteration.
                self._waiting[owner] = queue
        if self._begun or self._released:
            self._count()
