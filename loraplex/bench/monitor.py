"""The generator's own load during a run: its event loop's lag and its CPU time."""

import asyncio
import time
from dataclasses import dataclass, field

PERIOD = 0.02
BUSY_CPU = 0.8
LATE_SECONDS = 0.05


@dataclass(slots=True)
class Monitor:
    """Samples of a run. lags: seconds by which a timer came late. cpu: the process's CPU share of each second."""

    lags: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    _task: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self) -> None:
        second, used = time.perf_counter(), time.process_time()
        while True:
            due = time.perf_counter() + PERIOD
            await asyncio.sleep(PERIOD)
            now = time.perf_counter()
            self.lags.append(max(0.0, now - due))
            if now - second >= 1.0:
                cpu = time.process_time()
                self.cpu.append((cpu - used) / (now - second))
                second, used = now, cpu
