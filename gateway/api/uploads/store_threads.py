"""Threads for the writes and removals of uploads in the adapter store.

A write to a bucket may take minutes. In the default pool a few of them would hold up the pages, health checks and
everything else that needs a thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.sharing.turns import Turns

# Concurrent writes and removals, and those of one owner.
THREADS, EACH = 4, 2
T = TypeVar("T")
_THREADS = ThreadPoolExecutor(THREADS, thread_name_prefix="upload-store")


class StoreThreads:
    """Runner of the store's blocking calls. Owners take turns."""

    def __init__(self) -> None:
        self._turns = Turns(THREADS, EACH)

    async def run(self, owner: str, do: Callable[..., T], *arguments: object) -> T:
        """Return `do(*arguments)`. Call it where a leaving client cancels nothing, so that the turn lasts as long."""
        async with self._turns.turn(owner):
            return await asyncio.get_running_loop().run_in_executor(_THREADS, do, *arguments)
