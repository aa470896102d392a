"""Event loop with simulated time: code that sleeps, waits and reads `time.monotonic` runs as fast as the CPU allows."""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any
from unittest.mock import patch


class _Selector(selectors.SelectSelector):
    """Selector that does not wait: it moves the clock forward to the next event."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for an event that never comes")
        self.now += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in simulated time, which begins at 0. `time.monotonic` returns it meanwhile."""
    loop = SimulatedLoop()
    with patch.object(time, "monotonic", loop.time), asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main)
