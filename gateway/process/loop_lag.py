"""The event loop's lag: how late its timers run, and deadlines that exclude the loop's own stalls.

A stall (a long computation on the loop, a machine without CPU time) looks like a server that does not answer: the
answer waits in the socket's buffer while the deadline passes.
"""

import asyncio
import time
from collections import deque
from types import TracebackType

TICK_SECONDS = 0.05
# A timer later than this is a stall; less is the ordinary work of other callbacks.
STALL_SECONDS = 0.02
# Stalls older than this are forgotten.
WINDOW_SECONDS = 60.0
# Slices of a deadline.
SLICES = 10


class LoopLag:
    """Measures an event loop while `watch` runs. Times are `time.monotonic`'s."""

    def __init__(self) -> None:
        # Lag of the newest tick, in seconds.
        self.last = 0.0
        # End and length of each stall in the window.
        self._stalls: deque[tuple[float, float]] = deque()
        self._due: float | None = None

    @property
    def longest(self) -> float:
        """Return the longest stall of the last minute, in seconds."""
        self._forget(time.monotonic())
        return max((length for _, length in self._stalls), default=0.0)

    def since(self, moment: float) -> float:
        """Return the seconds since `moment` during which the loop stalled, a running stall included; at most a minute
        back.

        A caller that trusts a value for n seconds adds this to n: while the loop stalled, nothing could refresh the
        value.
        """
        now = time.monotonic()
        found = sum(min(length, end - moment) for end, length in self._stalls if end > moment)
        if self._due is not None and now - self._due > STALL_SECONDS:
            # The tick that will record this stall has not run yet.
            found += min(now - self._due, max(0.0, now - moment))
        return found

    async def watch(self) -> None:
        """Measure without end. Run it as a task."""
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
    """Cancel the block after so many seconds with TimeoutError, like `asyncio.timeout`, but do not count stalls of the
    loop.

    The time is counted in slices, each with its own length however late its timer runs. The last timer must be on time:
    after a stall, answers that have arrived are read first. A loop whose timers are never on time cannot keep the block
    alive without end: twice the slices end it in any case.
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
