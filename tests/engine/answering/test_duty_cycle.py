"""Duty cycle of jobs without urgency: its pauses by a clock, and between loads by name beside a running request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from engine.answering import duty_cycle as duty_cycle_module
from engine.answering.duty_cycle import DutyCycle
from testing.engine import SLOW, Client, RunningServer
from testing.tiny import save_adapter, save_model

SHARE = 0.1


async def test_a_pause_ends_early_on_an_idle_engine_and_is_limited(monkeypatch: pytest.MonkeyPatch):
    idle, clock, limits = asyncio.Event(), [1000.0], list[float]()
    monkeypatch.setattr(duty_cycle_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    @asynccontextmanager
    async def timeout(seconds: float) -> AsyncIterator[None]:
        """Record the longest pause, which is over at once."""
        limits.append(seconds)
        async with asyncio.timeout(0):
            yield

    monkeypatch.setattr(duty_cycle_module, "asyncio", SimpleNamespace(timeout=timeout))
    duty_cycle = DutyCycle(SHARE, idle.wait)

    def run(seconds: float, *, fails: bool = False) -> None:
        with duty_cycle.measure():
            clock[0] += seconds
            if fails:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run(0.02, fails=True)
    await duty_cycle.wait()
    assert limits.pop() == pytest.approx(0.02 * (1 / SHARE - 1)), "a job that fails counts too"
    clock[0] += 0.1
    await duty_cycle.wait()
    assert limits.pop() == pytest.approx(0.02 * (1 / SHARE - 1) - 0.1)
    clock[0] += 1.0
    await duty_cycle.wait()
    assert limits.pop() == 0.0
    monkeypatch.setattr(duty_cycle_module, "MAX_PAUSE_S", 0.1)
    run(0.1)
    await duty_cycle.wait()
    assert limits.pop() == pytest.approx(0.1), "not nine times its time"


async def test_the_end_of_a_short_job_does_not_shorten_the_pause_after_a_longer_one(monkeypatch: pytest.MonkeyPatch):
    clock = [1000.0]
    monkeypatch.setattr(duty_cycle_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    duty_cycle = DutyCycle(SHARE, asyncio.Event().wait)
    with duty_cycle.measure():
        clock[0] += 0.5
        with duty_cycle.measure():  # a job that runs beside the other one
            clock[0] += 0.01
    ends_at = duty_cycle._ends_at
    assert ends_at == pytest.approx(clock[0] + 0.51 * (1 / SHARE - 1))
    with duty_cycle.measure():
        clock[0] += 0.01
    assert duty_cycle._ends_at == ends_at


async def test_the_end_of_another_job_lengthens_a_pause_that_has_begun(monkeypatch: pytest.MonkeyPatch):
    """A probe waited for the pause that it found, and began in the pause after a longer job that ended meanwhile."""
    clock, limits, has_begun, may_end = [1000.0], list[float](), asyncio.Semaphore(0), asyncio.Semaphore(0)
    monkeypatch.setattr(duty_cycle_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    @asynccontextmanager
    async def timeout(seconds: float) -> AsyncIterator[None]:
        """Record the pause, which is over once the test says so."""
        limits.append(seconds)
        has_begun.release()
        await may_end.acquire()
        clock[0] += seconds
        async with asyncio.timeout(0):
            yield

    monkeypatch.setattr(duty_cycle_module, "asyncio", SimpleNamespace(timeout=timeout))
    duty_cycle, jobs = DutyCycle(SHARE, asyncio.Event().wait), [ExitStack(), ExitStack()]
    for job in jobs:
        job.enter_context(duty_cycle.measure())
    with duty_cycle.measure():
        clock[0] += 0.1
    waiting = asyncio.create_task(duty_cycle.wait())
    for job, seconds in zip(jobs, (0.4, 2.0), strict=True):
        await asyncio.wait_for(has_begun.acquire(), 10)
        clock[0] += seconds
        job.close()
        may_end.release()
    may_end.release()
    await waiting
    assert limits == pytest.approx([0.9, 3.6, 0.0]), "to 5 s after the beginning, though the last job's pause is longer"


async def test_a_pause_ends_at_once_where_the_engine_is_idle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(duty_cycle_module, "MAX_PAUSE_S", 36_000.0)
    idle = asyncio.Event()
    duty_cycle = DutyCycle(1e-9, idle.wait)
    with duty_cycle.measure():
        await asyncio.sleep(0.01)
    waiting = asyncio.create_task(duty_cycle.wait())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    idle.set()
    await asyncio.wait_for(waiting, 60)


@pytest.mark.usefixtures("slow_steps")
async def test_loads_by_name_pause_while_a_request_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.answering.model_names.NAMED_SHARE", 1e-9)
    monkeypatch.setattr(duty_cycle_module, "MAX_PAUSE_S", 36_000.0)
    save_model(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    load = {"lora_name": "mine", "lora_path": str(tmp_path / "adapter"), "load_inplace": True}
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3500, "ignore_eos": True} | SLOW
    with closing(RunningServer(tmp_path / "base")) as server:
        async with aiohttp.ClientSession() as session:
            client = Client(session, server.url)
            for _ in range(2):
                await client.ok("/v1/load_lora_adapter", load)
            running = asyncio.create_task(client.ok("/v1/completions", body))
            await client.wait_for(lambda state: state["running"] == 1)
            loading = asyncio.create_task(client.ok("/v1/load_lora_adapter", load))
            for _ in range(20):
                is_loaded = loading.done()
                assert (await client.state())["running"], "the request outlasts the checks"
                assert not is_loaded
            running.cancel()
            await loading
