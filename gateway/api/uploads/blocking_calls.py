"""Threads for the blocking calls of uploads: their writes to the disk, and those to the adapter store.

A write to a bucket may take minutes. In the default pool a few of them would hold up the pages, health checks and
everything else that needs a thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.api.requests.memory import OPERATOR
from gateway.sharing.concurrency import ConcurrencyLimiter

# Concurrent calls of all tenants, of the operator, and of one tenant at most.
THREADS, OPERATORS_THREADS, MAX_PER_TENANT = 4, 2, 2
T = TypeVar("T")


class BlockingCalls:
    """Runner of blocking calls of one kind. Tenants take turns, and the operator waits for none of them."""

    def __init__(self, name: str) -> None:
        """name: that of the threads."""
        self._threads = ThreadPoolExecutor(THREADS + OPERATORS_THREADS, thread_name_prefix=name)
        self._limiter = ConcurrencyLimiter(THREADS, MAX_PER_TENANT)
        self._operators = ConcurrencyLimiter(OPERATORS_THREADS, OPERATORS_THREADS)

    async def run(self, owner: str, do: Callable[..., T], *arguments: object) -> T:
        """Return `do(*arguments)`. Call it shielded from cancellation: otherwise the place is free while the
        thread still runs."""
        limiter = self._operators if owner == OPERATOR else self._limiter
        async with limiter.place(owner):
            return await asyncio.get_running_loop().run_in_executor(self._threads, do, *arguments)
