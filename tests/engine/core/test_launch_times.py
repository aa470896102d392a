"""A step is planned shortly before the device needs it, so that it includes the requests that came meanwhile."""

import statistics
import time
from pathlib import Path

import pytest

from engine.core.messages import Event, Stepped
from engine.core.step_thread import StepThread
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from testing.tiny_engines import engine_maker, save_base_and_adapters

STEP_S = 0.03


class Waits:
    """Arrivals at an engine on a device with steps of STEP_S, beside a stream that never ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first: dict[str, float] = {}
        self._steps = StepThread(engine, self._see)

    def _see(self, event: Event) -> None:
        if isinstance(event, Stepped):
            for output in event.outputs:
                if output.token_ids:
                    self._first.setdefault(output.request_id, time.perf_counter())

    def _add(self, request_id: str, max_tokens: int) -> None:
        self._steps.add(NewRequest(request_id, [3], SamplingParams(max_tokens=max_tokens, ignore_eos=True)))

    async def measure(self) -> tuple[float, float]:
        """Return the median wait of 24 arrivals for their first token, and the mean duration of a step, in STEP_S."""
        self._steps.start()
        try:
            self._add("stream", 900)
            time.sleep(120 * STEP_S)
            arrived = {}
            began, before = time.perf_counter(), self._engine.state().num_steps
            for i in range(24):
                arrived[f"{i}"] = time.perf_counter()
                self._add(f"{i}", 1)
                time.sleep(2.37 * STEP_S)
            time.sleep(3 * STEP_S)
            seconds, steps = time.perf_counter() - began, self._engine.state().num_steps - before
        finally:
            await self._steps.close()
        waits = [self._first[request_id] - moment for request_id, moment in arrived.items()]
        return statistics.median(waits) / STEP_S, seconds / steps / STEP_S


async def test_an_arrival_joins_the_next_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    make_engine = engine_maker(
        save_base_and_adapters(tmp_path, 1024), request, device=f"simulated:{1000 * STEP_S},0", kv_cache_memory=1 << 30
    )
    found = []
    # Three times, because a busy machine may delay arrivals and steps.
    for _ in range(3):
        engine, _ = make_engine()
        found.append(await Waits(engine).measure())
        # The rest of the running step and a step of its own are 1.5 in the mean. Arrivals that always miss the next
        # step wait for 2.5. The device must not be idle meanwhile.
        if found[-1][0] < 2.2 and found[-1][1] < 1.05:
            return
    pytest.fail(f"wait and duration of a step: {found}")
