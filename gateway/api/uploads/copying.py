"""Long copies of uploads' content on threads of their own, so that other uploads' writes do not wait for them."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.api.requests.memory import OPERATOR
from gateway.api.uploads.receiving import Workplace
from gateway.sharing.concurrency import ConcurrencyLimiter

# Concurrent copies of tenants and of the operator; a tenant has one of them.
COPIES, OPERATORS_COPIES = 4, 1
T = TypeVar("T")
_THREADS = ThreadPoolExecutor(COPIES + OPERATORS_COPIES, thread_name_prefix="upload-copy")


class Stopped(Exception):
    """The copy's caller has ended."""


class Copies:
    """Runner of blocking copies. Tenants take turns, and the operator waits for none of them."""

    def __init__(self) -> None:
        self._limiter, self._operators = ConcurrencyLimiter(COPIES), ConcurrencyLimiter(OPERATORS_COPIES)

    async def run(self, place: Workplace, owner: str, copy: Callable[[threading.Event], T]) -> T:
        """Run `copy` in a thread, with an event that is set when the caller is cancelled.

        The copy must pass its pieces through `until_stopped`, because the workplace is removed only after its end.
        """
        return await place.run(self._run(owner, copy))

    async def _run(self, owner: str, copy: Callable[[threading.Event], T]) -> T:
        limiter = self._operators if owner == OPERATOR else self._limiter
        async with limiter.place(owner):
            stop = threading.Event()
            work = asyncio.get_running_loop().run_in_executor(_THREADS, copy, stop)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                stop.set()
                # The owner's place is free when the thread ends, so that cancelled copies do not use up the threads.
                await asyncio.wait({work})
                raise


def until_stopped(pieces: Iterable[bytes], stop: threading.Event) -> Iterator[bytes]:
    """Yield the pieces. Raises Stopped at the first piece after `stop` is set."""
    for piece in pieces:
        if stop.is_set():
            raise Stopped
        yield piece
