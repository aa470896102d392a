"""Coalescing of equal database queries from concurrent callers."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lookups(Generic[K, V]):
    """Coalesces concurrent lookups of one key.

    A caller never receives the result of a query that started before its own call, so it always reads its own writes.
    """

    def __init__(self, look_up: Callable[[K], Awaitable[V]]) -> None:
        self._look_up = look_up
        self._out: dict[K, asyncio.Task[V]] = {}
        self._next: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K) -> V:
        """Return the result of a query that starts after this call, or raise its error.

        A cancelled caller does not stop the query.
        """
        lookup = self._next.get(key)
        if lookup is None:
            lookup = self._next[key] = asyncio.create_task(self._ask(key))
            lookup.add_done_callback(_retrieve_error)
        return await asyncio.shield(lookup)

    async def close(self) -> None:
        """Wait for the running queries, whose callers may have left."""
        if running := {*self._out.values(), *self._next.values()}:
            await asyncio.wait(running)

    async def _ask(self, key: K) -> V:
        if (before := self._out.get(key)) is not None:
            await asyncio.wait({before})
        self._out[key] = self._next.pop(key)
        try:
            return await self._look_up(key)
        finally:
            del self._out[key]


def _retrieve_error(lookup: "asyncio.Task[V]") -> None:
    """Retrieve the error, which asyncio would log if every caller has left."""
    if not lookup.cancelled():
        lookup.exception()
