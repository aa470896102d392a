"""Limit of the work that runs at the same time. Owners get its places in turn, so that no owner holds all of them."""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Maximum rest, so that work that was slow for another reason does not delay its owner for long.
MAX_REST_SECONDS = 5.0
# Tenants' concurrent reports, and a tenant's rest after one.
REPORTS, REPORT_REST = 4, 3.0


class ConcurrencyLimiter:
    """Places that are given to owners in turn. An owner holds at most `each` places at once.

    rest: a returned place is free for other owners at once, but for the same owner only after `rest` times as
    long as it was held, at most MAX_REST_SECONDS.
    """

    def __init__(self, places: int, each: int = 1, rest: float = 0.0) -> None:
        self._free = places
        self._each = each
        self._rest = rest
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Hold a place while the block runs."""
        if not self._free or owner in self._waiting or self._held[owner] >= self._each:
            await self._wait(owner)
        else:
            self._take(owner)
        began = time.monotonic()
        try:
            yield
        finally:
            rest = min(MAX_REST_SECONDS, self._rest * (time.monotonic() - began))
            self._give_back(owner, rest)

    async def _wait(self, owner: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._forget(owner, place)
                self._grant()
            else:
                self._give_back(owner)
            raise

    def _take(self, owner: str) -> None:
        self._free -= 1
        self._held[owner] += 1

    def _give_back(self, owner: str, rest: float = 0.0) -> None:
        self._free += 1
        if rest:
            asyncio.get_running_loop().call_later(rest, self._end_rest, owner)
            self._grant()
        else:
            self._end_rest(owner)

    def _end_rest(self, owner: str) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._grant()

    def _grant(self) -> None:
        for owner in list(self._waiting):
            if not self._free:
                return
            if self._held[owner] >= self._each:
                continue
            place = self._waiting[owner][0]
            self._forget(owner, place)
            if owner in self._waiting:
                self._waiting.move_to_end(owner)
            if not place.done():
                self._take(owner)
                place.set_result(None)

    def _forget(self, owner: str, place: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner, deque())
        if place in queue:
            queue.remove(place)
        if not queue:
            self._waiting.pop(owner, None)


def report_limiter() -> ConcurrencyLimiter:
    """Return the limiter of tenants' reports: a tenant holds one place, so that database connections stay free.

    After a report its tenant rests for three times the report's duration, so a tenant uses at most a quarter of a core.
    """
    return ConcurrencyLimiter(REPORTS, rest=REPORT_REST)
