"""A request's arrival, from which its target counts: before its adapter's load and its grammar's compilation."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from engine.core.messages import AdapterFacts, LoadAdapter
from engine.scheduling.request import Request
from engine.structured.compiler import Grammar, GrammarCompiler
from testing.engine import Client, RunningServer
from wire.structured import GrammarSpec

TOKEN = "secret"


@pytest.fixture(scope="module")
def server(model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("store")
    DirectoryStore(store).put(adapter, BaseShape.from_config_dir(model))
    running = RunningServer(model, store, internal_token=TOKEN)
    yield running
    running.close()


@pytest.fixture
def scheduled(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the arrivals of the requests that were scheduled so far."""
    scheduler, arrivals = server.core.engine.scheduler, list[float]()
    add = scheduler.add

    def recorded(request: Request) -> None:
        add(request)
        arrivals.append(request.arrived_at)

    monkeypatch.setattr(scheduler, "add", recorded)
    return arrivals


async def ask(client: Client, headers: dict[str, str] | None = None, **fields: Any) -> None:
    headers = {"x-loraplex-internal-token": TOKEN} | (headers or {})
    await client.ok("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2} | fields, headers=headers)


async def test_an_age_moves_the_arrival_back(client: Client, scheduled: list[float]):
    before = time.monotonic()
    await ask(client, {"x-loraplex-age": "20.5"})
    assert before <= scheduled[0] + 20.5 <= time.monotonic()


@pytest.mark.parametrize("waits_for", ["adapter", "grammar"])
async def test_a_wait_before_the_scheduler_comes_after_the_arrival(
    waits_for: str, client: Client, server: RunningServer, scheduled: list[float], monkeypatch: pytest.MonkeyPatch
):
    """The metric of the engine's times to first token counts the wait too."""
    gate, began = threading.Event(), threading.Event()
    load, compile_now = server.core._load_adapter, GrammarCompiler.compile

    async def load_later(asked: LoadAdapter) -> AdapterFacts | None:
        began.set()
        await asyncio.to_thread(gate.wait, 60)
        return await load(asked)

    def compile_later(self: GrammarCompiler, spec: GrammarSpec) -> Grammar:
        began.set()
        gate.wait(60)
        return compile_now(self, spec)

    monkeypatch.setattr(server.core, "_load_adapter", load_later)
    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    assert server.store is not None
    [digest] = DirectoryStore(server.store).list()
    fields = {"adapter": {"model": f"sha256:{digest}"}, "grammar": {"guided_regex": "ab{3}"}}[waits_for]
    seconds = await first_token_seconds(client)
    try:
        asked = asyncio.create_task(ask(client, **fields))
        assert await asyncio.to_thread(began.wait, 60)
        waiting = time.monotonic()
        await asyncio.sleep(0.1)
        released = time.monotonic()
    finally:
        gate.set()
    await asked
    assert scheduled[0] <= waiting
    assert await first_token_seconds(client) - seconds >= released - waiting


async def first_token_seconds(client: Client) -> float:
    """Return the sum of all times to first token."""
    async with client.session.get(client.url + "/metrics") as response:
        page = await response.text()
    [line] = [line for line in page.splitlines() if line.startswith("loraplex_engine_time_to_first_token_seconds_sum")]
    return float(line.split()[1])
