"""Limit on the share of time that background jobs, such as a probe's forward passes, take while requests run."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

# Maximum pause: a job may take long without using the engine, such as with a slow store.
MAX_PAUSE_S = 5.0


class DutyCycle:
    """Limit of the share of time that jobs use: a pause after each job, in proportion to its duration.

    share: the maximum; greater than 0, at most 1. wait_idle: waits until the engine has no request.
    """

    def __init__(self, share: float, wait_idle: Callable[[], Awaitable[None]]) -> None:
        self._share, self._wait_idle = share, wait_idle
        self._ends_at = 0.0

    async def wait(self) -> None:
        """Wait until the pause ends or the engine is idle, because then a job delays no request.

        Another job that ends during the wait lengthens the pause, to at most MAX_PAUSE_S from now.
        """
        now, waited_until = time.monotonic(), -math.inf
        latest = now + MAX_PAUSE_S
        while (ends_at := min(self._ends_at, latest)) > waited_until:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, ends_at - now)):
                    await self._wait_idle()
                    return
            now, waited_until = time.monotonic(), ends_at

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the job in the block. The pause begins at its end, also after an error. The end of a job beside this
        one does not shorten it.
        """
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            pause = min(MAX_PAUSE_S, (ended - started) * (1 / self._share - 1))
            self._ends_at = max(self._ends_at, ended + pause)
