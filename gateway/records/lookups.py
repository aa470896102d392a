"""Equal questions to the database, asked once for all who wait."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lookups(Generic[K, V]):
    """Nobody gets an answer that was asked for before they came: it might lack what they know to be there. Whoever
    comes while a question is out waits for the next one, with all the others."""

    def __init__(self, look_up: Callable[[K], Awaitable[V]]) -> None:
        self._look_up = look_up
        self._out: dict[K, asyncio.Task[V]] = {}
        self._next: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K) -> V:
        """Raises what the question ended with, to each who waits for it; one who leaves does not end it for others."""
        lookup = self._next.get(key)
        if lookup is None:
            lookup = self._next[key] = asyncio.create_task(self._ask(key))
            lookup.add_done_callback(_hear)
        return await asyncio.shield(lookup)

    async def _ask(self, key: K) -> V:
        if (before := self._out.get(key)) is not None:
            await asyncio.wait({before})
        self._out[key] = self._next.pop(key)
        try:
            return await self._look_up(key)
        finally:
            del self._out[key]


def _hear(lookup: "asyncio.Task[V]") -> None:
    """What it raised was for those who waited, also where all have left."""
    if not lookup.cancelled():
        lookup.exception()
