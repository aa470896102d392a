"""The session's tiny model, and a server on it per module, configured as the test file needs."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from testing.engine import Client, RunningServer
from testing.tiny import save_adapter, save_model


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
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(model, tmp_path_factory.mktemp("store"))
    yield running
    running.close()


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
