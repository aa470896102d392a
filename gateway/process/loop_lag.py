"""Lag of the event loop (the delay of its timers), and deadlines that exclude the loop's own stalls.

A stall (a long computation on the loop, a machine without CPU time) looks like a server that does not answer: the
answer waits in the socket's buffer while the deadline passes.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from gateway.process.loop_stalls import EXPLAINED_SECONDS, Stall, Watchdog
from gateway.process.thread_times import ThreadTimes

# A stall may begin up to a tick before the tick is due, so its lag is shorter by up to TICK_SECONDS. With 0.05, the lag
# of a stall of 130 ms is often below EXPLAINED_SECONDS.
TICK_SECONDS = 0.03
# A timer that is later than this is a stall; a shorter delay is the ordinary work of other callbacks.
STALL_SECONDS = 0.02
# Stalls older than this are dropped.
WINDOW_SECONDS = 60.0
# Number of slices of a deadline.
SLICES = 10


class LoopLag:
    """Lag of an event loop, measured while `watch` runs. Times are `time.monotonic`'s.

    explained: called in the loop with each stall of more than EXPLAINED_SECONDS, from `explain_from_now` on.
    """

    def __init__(self, explained: Callable[[Stall], None]) -> None:
        self._explained = explained
        self._explained_from = math.inf
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
        """Return the seconds of the loop's stalls since `moment`. Stalls older than a minute are not counted.

        A running stall is included. A caller that trusts a value for n seconds adds this to n, because nothing could
        refresh the value while the loop stalled.
        """
        now = time.monotonic()
        found = sum(min(length, end - moment) for end, length in self._stalls if end > moment)
        if self._due is not None and now - self._due > STALL_SECONDS:
            # The tick that will record this stall has not run yet.
            found += min(now - self._due, max(0.0, now - moment))
        return found

    def explain_from_now(self) -> None:
        """Explain the stalls that begin from now on. Earlier ones delay no client, because none can connect yet."""
        self._explained_from = time.monotonic()

    async def watch(self) -> None:
        """Measure until cancelled. Run it as a task."""
        watchdog, times = Watchdog(lambda: self._due), ThreadTimes()
        try:
            while True:
                before = times.read()
                self._due = before.at + TICK_SECONDS
                await asyncio.sleep(TICK_SECONDS)
                now = time.monotonic()
                self.last = max(0.0, now - self._due)
                if self.last > STALL_SECONDS:
                    self._stalls.append((now, self.last))
                if self.last > EXPLAINED_SECONDS and before.at > self._explained_from:
                    after = times.read()
                    self._explained(watchdog.explain(self._due, before, after))
                self._forget(now)
        finally:
            self._due = None
            watchdog.end()
            times.close()

    def _forget(self, now: float) -> None:
        while self._stalls and self._stalls[0][0] < now - WINDOW_SECONDS:
            self._stalls.popleft()


class deadline:
    """Deadline that ends the block with TimeoutError, like `asyncio.timeout`, but does not count stalls of the loop.

    The time is divided into slices; each counts with its nominal length, however late its timer runs. The last timer
    must be on time, so that after a stall the answers that have arrived are read first. If no timer is ever on time,
    the block ends after twice the number of slices.
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
