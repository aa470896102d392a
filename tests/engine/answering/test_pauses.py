"""Pauses between jobs without urgency: of a loop, and between loads by name beside a running request."""

import asyncio
import time
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from engine.answering.pauses import Pauses
from testing.engine import Client, RunningServer
from testing.tiny import save_adapter, save_model

SHARE = 0.1


async def test_a_rest_ends_early_on_an_idle_engine_and_is_limited(monkeypatch: pytest.MonkeyPatch):
    idle = asyncio.Event()

    async def wait_idle() -> None:
        await idle.wait()

    pauses = Pauses(SHARE, wait_idle)

    async def fail() -> None:
        with pauses.after():
            await asyncio.sleep(0.02)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await fail()
    started = time.monotonic()
    await pauses.wait()
    assert time.monotonic() - started >= 0.02 * (1 / SHARE - 1) - 0.01, "a job that fails counts too"
    monkeypatch.setattr("engine.answering.pauses.MAX_PAUSE_S", 0.1)
    with pauses.after():
        await asyncio.sleep(0.1)
    started = time.monotonic()
    await pauses.wait()
    assert time.monotonic() - started < 0.1 * (1 / SHARE - 1), "not nine times its time"
    monkeypatch.setattr("engine.answering.pauses.MAX_PAUSE_S", 3600.0)
    with pauses.after():
        await asyncio.sleep(0.5)
    idle.set()
    started = time.monotonic()
    await pauses.wait()
    assert time.monotonic() - started < 3


async def test_loads_by_name_pause_while_a_request_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.answering.model_names.NAMED_SHARE", 1e-9)
    monkeypatch.setattr("engine.answering.pauses.MAX_PAUSE_S", 3600.0)
    save_model(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    load = {"lora_name": "mine", "lora_path": str(tmp_path / "adapter"), "load_inplace": True}
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 600, "ignore_eos": True}
    checks = 0
    with closing(RunningServer(tmp_path / "base")) as server:
        async with aiohttp.ClientSession() as session:
            client = Client(session, server.url)
            for _ in range(2):
                await client.ok("/v1/load_lora_adapter", load)
            running = asyncio.create_task(client.ok("/v1/completions", body))
            await client.wait_for(lambda state: state["running"] == 1)
            loading = asyncio.create_task(client.ok("/v1/load_lora_adapter", load))
            while True:
                is_loaded = loading.done()
                if not (await client.state())["running"]:
                    break
                assert not is_loaded
                checks += 1
            await loading
            await running
    assert checks
