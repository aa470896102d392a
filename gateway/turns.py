"""Places that owners take in turn, so that no owner holds all of them."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Gives places to owners in turn. An owner has at most one place, however many it waits for."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._holders: set[str] = set()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Hold a place while the block runs."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        self._grant()
        try:
            await place
            yield
        finally:
            if place.done() and not place.cancelled():
                self._free += 1
                self._holders.discard(owner)
            elif owner in self._waiting:
                self._forget(owner, place)
            self._grant()

    def _grant(self) -> None:
        for owner in list(self._waiting):
            if not self._free:
                return
            if owner in self._holders:
                continue
            place = self._waiting[owner][0]
            self._forget(owner, place)
            if owner in self._waiting:
                self._waiting.move_to_end(owner)
            if not place.done():
                self._free -= 1
                self._holders.add(owner)
                place.set_result(None)

    def _forget(self, owner: str, place: asyncio.Future[None]) -> None:
        queue = self._waiting[owner]
        if place in queue:
            queue.remove(place)
        if not queue:
            del self._waiting[owner]
