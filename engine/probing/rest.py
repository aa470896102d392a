"""Pauses between probes, so that probes use at most SHARE of the time while other requests run."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

# Maximum share of the time, and maximum pause: a probe may take long without using the engine, such as with a slow
# store.
SHARE, MOST_REST_S = 0.1, 5.0


class Rest:
    """Rest after each probe, in proportion to its duration. wait_idle: waits until the engine has no request."""

    def __init__(self, wait_idle: Callable[[], Awaitable[None]]) -> None:
        self._wait_idle = wait_idle
        self._ends_at = 0.0

    async def wait(self) -> None:
        """Wait until the rest ends or the engine is idle, because then a probe delays no request."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._ends_at - time.monotonic())):
                await self._wait_idle()

    @contextmanager
    def after(self) -> Iterator[None]:
        """Measure the probe in the block. The rest begins at its end, also after an error."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._ends_at = ended + min(MOST_REST_S, (ended - started) * (1 / SHARE - 1))
