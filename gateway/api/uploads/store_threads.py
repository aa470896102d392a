"""Threads for the writes and removals of uploads in the adapter store.

A write to a bucket may take minutes. In the default pool a few of them would hold up the pages, health checks and
everything else that needs a thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.api.requests.memory import OPERATOR
from gateway.sharing.turns import Turns

# Concurrent calls of tenants and of the operator; a tenant has two of them.
THREADS, OPERATORS_THREADS, EACH = 4, 2, 2
T = TypeVar("T")
_THREADS = ThreadPoolExecutor(THREADS + OPERATORS_THREADS, thread_name_prefix="upload-store")


class StoreThreads:
    """Runner of the store's blocking calls. Tenants take turns, and the operator waits for none of them."""

    def __init__(self) -> None:
        self._turns, self._operators = Turns(THREADS, EACH), Turns(OPERATORS_THREADS, OPERATORS_THREADS)

    async def run(self, owner: str, do: Callable[..., T], *arguments: object) -> T:
        """Return `do(*arguments)`. Call it shielded from cancellation: otherwise the turn ends while the
        thread still runs."""
        turns = self._operators if owner == OPERATOR else self._turns
        async with turns.turn(owner):
            return await asyncio.get_running_loop().run_in_executor(_THREADS, do, *arguments)
