"""A step is planned shortly before the device needs it, so that it includes the requests that came meanwhile."""

import asyncio
import time
from pathlib import Path

import pytest

from engine.core.messages import Event, Stepped
from engine.core.step_thread import StepThread
from engine.scheduling.request import NewRequest, SamplingParams
from testing.tiny_engines import engine_maker, save_base_and_adapters

STEP_S, DEADLINE_S = 0.03, 25.0
# Number of arrivals that must join the next step. A few do so by chance, when this host delays a step.
EXPECTED = 6


async def test_an_arrival_joins_the_next_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """An arrival after the planning of the next step waits for two whole steps at least: the next one and its own. The
    rest of the running step and its own are less than two.
    """
    engine, _ = engine_maker(
        save_base_and_adapters(tmp_path, 1024), request, device=f"simulated:{1000 * STEP_S},0", kv_cache_memory=1 << 30
    )()
    first: dict[str, float] = {}

    def see(event: Event) -> None:
        if isinstance(event, Stepped):
            for output in event.outputs:
                if output.token_ids:
                    first.setdefault(output.request_id, time.perf_counter())

    def add(request_id: str, max_tokens: int) -> None:
        steps.add(NewRequest(request_id, [3], SamplingParams(max_tokens=max_tokens, ignore_eos=True)))

    async def answered(request_id: str) -> None:
        while request_id not in first:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.002)

    steps = StepThread(engine, see)
    steps.start()
    waits: list[float] = []
    try:
        add("stream", 900)
        await answered("stream")
        end = time.perf_counter() + DEADLINE_S
        while time.perf_counter() < end and sum(wait < 1.9 for wait in waits) < EXPECTED:
            request_id, arrived = str(len(waits)), time.perf_counter()
            add(request_id, 1)
            await answered(request_id)
            waits.append((first[request_id] - arrived) / STEP_S)
            # Each arrival is in another part of a step.
            await asyncio.sleep(len(waits) * 0.37 % 1 * STEP_S)
        steps.abort("stream")
    finally:
        await steps.close()
    assert sum(wait < 1.9 for wait in waits) >= EXPECTED, waits
