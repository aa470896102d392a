"""The event loop's lag: how late its timers run, and deadlines that leave the loop's own stalls out.

A stall (a long computation on the loop, a machine without CPU time) looks like a server that does not answer: the
answer waits in the socket's buffer while the deadline passes.
"""

import asyncio
import time
from collections import deque
from types import TracebackType

TICK_SECONDS = 0.05
# A timer that is later than this was held up; less is the ordinary work of other callbacks.
STALL_SECONDS = 0.02
# The time over which `longest` looks back; stalls older than this are forgotten.
WINDOW_SECONDS = 60.0
# Slices of a deadline.
SLICES = 10


class LoopLag:
    """Measures one event loop while `watch` runs. Moments are `time.monotonic`'s."""

    def __init__(self) -> None:
        # Lag of the newest tick, in seconds.
        self.last = 0.0
        # The end and the length of each stall within the window.
        self._stalls: deque[tuple[float, float]] = deque()
        self._due: float | None = None

    @property
    def longest(self) -> float:
        """The longest stall of the last minute, in seconds, the one that ends now included."""
        self._forget(time.monotonic())
        return max((length for _, length in self._stalls), default=0.0)

    def since(self, moment: float) -> float:
        """Return how many of the seconds since `moment` the loop stood still; at most a minute back.

        A caller that believes something for n seconds adds this to n, so that a stall of its own is not taken for the
        silence of whoever should have refreshed it.
        """
        now = time.monotonic()
        found = sum(min(length, end - moment) for end, length in self._stalls if end > moment)
        if self._due is not None and now - self._due > STALL_SECONDS:
            # The tick that would note this stall is still to run.
            found += min(now - self._due, max(0.0, now - moment))
        return found

    async def watch(self) -> None:
        """Measure for ever. Run it as a task."""
        try:
            while True:
                self._due = time.monotonic() + TICK_SECONDS
                await asyncio.sleep(TICK_SECONDS)
                now = time.monotonic()
                self.last = max(0.0, now - self._due)
                if self.last > STALL_SECONDS:
                    self._stalls.append((now, self.last))
                self._forget(now)
        finally:
            self._due = None

    def _forget(self, now: float) -> None:
        while self._stalls and self._stalls[0][0] < now - WINDOW_SECONDS:
            self._stalls.popleft()


class deadline:
    """Cancel the block after so many seconds with TimeoutError, like `asyncio.timeout`; a stall of the loop does not
    count.

    The time is counted in slices, each of which counts as its own length however late its timer runs. The last one must
    be on time: after a stall, answers that came meanwhile are read first. A loop that is never on time cannot keep the
    block alive for ever: then twice the slices end it.
    """

    def __init__(self, seconds: float) -> None:
        self._slice = seconds / SLICES
        self._left = SLICES
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._slice, self._count)

    def _count(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._timer is not None
        late = loop.time() - self._timer.when() > STALL_SECONDS
        self._left -= 1
        if self._left > -SLICES and (self._left > 0 or late):
            self._start()
        else:
            self._timer = None
            self._timeout.reschedule(loop.time())
