"""The session's tiny model, and a server on it per module, configured as the test file needs."""

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from testing.engine import SLOW, SLOW_STEP_S, Client, RunningServer
from testing.tiny import save_adapter, save_model

if TYPE_CHECKING:
    from testing.tiny_engines import Make

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, head_dim, fp32, tokens


@pytest.fixture(scope="session")
def model(starts_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model that the test servers run."""
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return folder


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "one"
    save_adapter(folder)
    return folder


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model with a context of 128 tokens, and of its adapters."""
    # torch takes seconds, so it is not imported at collection.
    from testing.tiny_engines import save_base_and_adapters

    return save_base_and_adapters(tmp_path_factory.mktemp("short"), 128)


@pytest.fixture
def make_simulated(short_model: Path, request: pytest.FixtureRequest) -> "Make":
    """Return a factory of engines on a simulated device, with so few blocks that requests are preempted."""
    from testing.tiny_engines import engine_maker

    return engine_maker(
        short_model,
        request,
        device="simulated:0,0",
        kv_cache_memory=20 * BLOCK_BYTES,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    )


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(model, tmp_path_factory.mktemp("store"))
    yield running
    running.close()


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let steps with a request of `SLOW` take long, so that it still runs when the test looks. The event ends that."""
    from engine.execution.runner import Runner  # takes seconds with torch, so it is not imported at collection

    plain, is_over = Runner.forward, threading.Event()

    def forward(runner: Runner, plan: Any) -> Any:
        if any(request.cache_salt == SLOW["cache_salt"] for request in plan):
            is_over.wait(SLOW_STEP_S)
        return plain(runner, plan)

    monkeypatch.setattr(Runner, "forward", forward)
    yield is_over
    is_over.set()


@pytest.fixture
async def session(starts_servers: None) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def client(session: aiohttp.ClientSession, server: RunningServer) -> Client:
    return Client(session, server.url)


@pytest.fixture
def guesses() -> Iterator[dict[str, list[int]]]:
    """Return the true answers by request, to be filled; every step of an engine with speculation drafts from them."""
    from testing.speculation import guessing  # takes seconds with torch, so it is not imported at collection

    with guessing() as truth:
        yield truth
