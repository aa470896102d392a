"""A store that answers slowly: one tenant's 500 adapters delay neither residents nor other tenants' loads."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from adapters import checkpoint
from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from engine.core import service
from testing.engine import Client, RunningServer
from testing.many_adapters import make_scaled
from testing.tiny import save_adapter, save_model

SEATS, MAX_WAITING, TOKEN = 8, 40, "internal"
HALF = (SEATS + MAX_WAITING) // 2


class SlowStore(DirectoryStore):
    """Store whose reads of the digests in `held` end when `opened` is set."""

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self.held: set[str] = set()
        self.opened = threading.Event()
        self.reads: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.now_reading = self.most_reading = 0

    def path(self, digest: str) -> Path | None:
        with self._lock:
            self.reads[digest] += 1
            self.now_reading += digest in self.held
            self.most_reading = max(self.most_reading, self.now_reading)
        if digest in self.held:
            self.opened.wait(200)
            with self._lock:
                self.now_reading -= 1
        return super().path(digest)


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path / "store")


@pytest.fixture
def server(
    starts_servers: None, tmp_path: Path, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningServer]:
    save_model(tmp_path / "model")
    monkeypatch.setattr(service, "open_store", lambda *_: store)
    # Room for 24 of the adapters in host memory, which take 4 KiB each: less than are loaded.
    options = {"max_num_seqs": SEATS, "host_adapter_memory": 24 * 4096}
    running = RunningServer(
        tmp_path / "model", tmp_path / "store", options, max_waiting=MAX_WAITING, internal_token=TOKEN
    )
    yield running
    store.opened.set()
    running.close()


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[Client]:
    headers = {"x-loraplex-internal-token": TOKEN}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session, server.url)


async def ask(client: Client, tenant_id: str, digest: str) -> tuple[int, str]:
    body = {"model": f"sha256:{digest}", "prompt": "Hi", "max_tokens": 2, "temperature": 0}
    status, answer = await client.post("/v1/completions", body, headers={"x-loraplex-tenant": tenant_id})
    return status, answer.get("error", {}).get("code", "")


@pytest.mark.timeout(300)
async def test_500_adapters_of_one_tenant_in_a_slow_store(
    client: Client, server: RunningServer, store: SlowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tmp_path / "adapter")
    first = store.put(tmp_path / "adapter", BaseShape.from_config_dir(tmp_path / "model")).digest
    mine, others, *many = make_scaled(store, first, 502)
    hashed: Counter[str] = Counter()
    really = checkpoint._digest

    def count(*given: object) -> str:
        digest = really(*given)  # type: ignore[arg-type]
        hashed[digest] += 1
        return digest

    monkeypatch.setattr(checkpoint, "_digest", count)
    assert await ask(client, "neighbour", mine) == (200, "")
    store.held = set(many)
    asking = [asyncio.create_task(ask(client, "slow", digest)) for digest in many]
    # Loads count against max_waiting: the tenant has half of the places, and the rest is refused at once.
    async with asyncio.timeout(90):
        while sum(task.done() for task in asking) < len(many) - HALF:  # noqa: ASYNC110 - polls other tasks
            await asyncio.sleep(0.01)
    assert {task.result() for task in asking if task.done()} == {(429, "engine_share_used")}
    async with asyncio.timeout(90):
        # Nothing that the slow reads hold up is needed for a resident, or for another tenant's load.
        assert [await ask(client, "neighbour", mine) for _ in range(5)] == [(200, "")] * 5
        assert await ask(client, "other", others) == (200, "")
    async with asyncio.timeout(90):
        while store.most_reading < 2:  # noqa: ASYNC110 - read on other threads
            await asyncio.sleep(0.01)
    assert store.most_reading == 2, "a thread of three is left to other tenants"
    host = server.core.host_cache
    store.opened.set()
    most = 0
    async with asyncio.timeout(90):
        while not all(task.done() for task in asking):
            most = max(most, host.stats().num_bytes)
            await asyncio.sleep(0.001)
    assert Counter(task.result() for task in asking) == {(200, ""): HALF, (429, "engine_share_used"): 500 - HALF}
    assert 0 < most <= 24 * 4096, "adapters that are being read count against the limit"
    # Some of the loaded adapters were evicted and are read again; none is hashed again.
    loaded = [digest for digest, task in zip(many, asking, strict=True) if task.result()[0] == 200]
    assert set(hashed.values()) == {1}
    assert set(loaded) < set(hashed)
    for digest in loaded[:4]:
        host.drop(digest)
        assert host.fetch(digest).result(30).digest == digest
    assert set(hashed.values()) == {1}
