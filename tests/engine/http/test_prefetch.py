"""The route by which gateways hint at adapters of waiting requests."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.fair_threads import FairThreads
from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from engine.core import prefetching
from testing.engine import Client, RunningServer
from testing.tiny import save_adapter

TOKEN = "internal"
INTERNAL = {"headers": {"x-loraplex-internal-token": TOKEN}}
ADAPTERS = 12


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> DirectoryStore:
    folder = tmp_path_factory.mktemp("store")
    store = DirectoryStore(folder / "adapters")
    for seed in range(ADAPTERS):
        save_adapter(folder / f"a{seed}", seed=seed)
        store.put(folder / f"a{seed}", BaseShape.from_config_dir(model))
    return store


@pytest.fixture
def digests(store: DirectoryStore) -> list[str]:
    return [f"sha256:{digest}" for digest in store.list()]


@pytest.fixture(scope="module")
def server(model: Path, store: DirectoryStore) -> Iterator[RunningServer]:
    # Host memory for about 16 adapters, so a tenant's hints have room for about 2.
    size = (store.root.parent / "a0" / "adapter_model.safetensors").stat().st_size
    running = RunningServer(model, store.root, config={"host_adapter_memory": 16 * size}, internal_token=TOKEN)
    yield running
    running.close()


async def hint(client: Client, adapter: str, tenant_id: str = "acme") -> bool:
    return (await client.ok("/prefetch", {"adapter": adapter, "tenant": tenant_id}, **INTERNAL))["is_loaded"]


async def host_resident(client: Client) -> int:
    async with client.session.get(client.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(
        int(float(line.split()[1])) for line in lines if line.startswith("loraplex_engine_adapter_host_resident")
    )


async def test_a_hinted_adapter_is_in_host_memory_when_its_request_comes(client: Client, digests: list[str]):
    assert await hint(client, digests[0])
    assert await host_resident(client) == 1
    # Nothing is on the device before the request.
    assert (await client.state(**INTERNAL))["adapters_resident"] == []
    assert await hint(client, digests[0])
    body = {"model": digests[0], "prompt": "Hi", "max_tokens": 1}
    assert (await client.post("/v1/completions", body, **INTERNAL))[0] == 200
    # A missing adapter is the request's error, not the hint's.
    assert not await hint(client, "sha256:" + "0" * 64)


async def test_a_requests_load_takes_its_turn_by_its_tenants_weight(
    client: Client, digests: list[str], monkeypatch: pytest.MonkeyPatch
):
    submit, submitted = FairThreads.submit, list[Any]()

    def recorded(threads: FairThreads, tenant_id: str, work: Any, **options: Any) -> Any:
        submitted.append((tenant_id, options["weight"]))
        return submit(threads, tenant_id, work, **options)

    monkeypatch.setattr(FairThreads, "submit", recorded)
    headers = INTERNAL["headers"] | {"x-loraplex-tenant": "globex", "x-loraplex-weight": "3"}
    await client.ok("/v1/completions", {"model": digests[1], "prompt": "Hi", "max_tokens": 1}, headers=headers)
    assert submitted == [("globex", 3.0)]


async def test_a_tenants_hints_fill_a_part_of_the_host_memory_and_requests_are_served_beyond(
    client: Client, digests: list[str]
):
    followed = [await hint(client, digest, "hostile") for digest in digests]
    assert followed[0]
    assert not any(followed[-4:])
    assert sum(followed) < ADAPTERS / 2
    # Another tenant has a share of its own, and a request needs no hint.
    assert await hint(client, digests[-1], "globex")
    body = {"model": digests[-2], "prompt": "Hi", "max_tokens": 1}
    status, _ = await client.post(
        "/v1/completions", body, headers=INTERNAL["headers"] | {"x-loraplex-tenant": "hostile"}
    )
    assert status == 200


async def test_hints_that_arrive_together_exceed_the_share_by_less_than_an_adapter(
    server: RunningServer, client: Client, digests: list[str]
):
    cache = server.core.host_cache
    assert cache is not None
    for digest in digests:
        cache.drop(digest.removeprefix("sha256:"))
    followed = await asyncio.gather(*(hint(client, digest, "hasty") for digest in digests))
    held = [cache.get(digest.removeprefix("sha256:")) for digest in digests]
    sizes = [adapter.num_bytes for adapter in held if adapter is not None]
    assert len(sizes) == sum(followed) > 1
    share = cache.stats().max_bytes * prefetching.TENANT_SHARE
    assert sum(sizes) < share + max(sizes)


@pytest.mark.parametrize("body", [{}, {"adapter": "name"}, {"adapter": "sha256:" + "x" * 64}, {"adapter": 1}])
async def test_a_wrong_hint_is_refused(client: Client, body: Any):
    status, answer = await client.post("/prefetch", body, **INTERNAL)
    assert status == 400
    assert answer["error"]["param"] == "adapter"
    assert "adapter" in answer["error"]["message"]


async def test_only_a_gateway_hints(client: Client, digests: list[str]):
    assert (await client.post("/prefetch", {"adapter": digests[0]}))[0] == 401


async def test_pinned_adapters_stay_while_others_come_and_go_within_their_room(
    server: RunningServer, client: Client, digests: list[str], monkeypatch: pytest.MonkeyPatch
):
    # A quarter of the room is for about 4 of 12.
    kept = (await client.ok("/pins", {"adapters": digests}, **INTERNAL))["num_kept"]
    assert 2 <= kept <= 5
    cache = server.core.host_cache
    assert cache is not None
    # Adapters without room are not loaded again.
    for digest in digests[kept:]:
        cache.drop(digest.removeprefix("sha256:"))
    loads = cache.stats().loads
    assert (await client.ok("/pins", {"adapters": digests}, **INTERNAL))["num_kept"] == kept
    assert cache.stats().loads == loads
    pinned = {digest.removeprefix("sha256:") for digest in digests[:kept]}
    assert set(cache._pins) == pinned
    monkeypatch.setattr(prefetching, "PIN_SECONDS", 0.0)
    again = (await client.ok("/pins", {"adapters": digests[:kept]}, **INTERNAL))["num_kept"]
    assert again == kept
    deadline = time.monotonic() + 60
    while cache._pins:
        assert time.monotonic() < deadline, "pins that no gateway repeats end"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("body", [{}, {"adapters": ["name"]}, {"adapters": ["sha256:" + "0" * 64] * 1001}])
async def test_wrong_pins_are_refused(client: Client, body: Any):
    status, answer = await client.post("/pins", body, **INTERNAL)
    assert status == 400
    assert answer["error"]["param"] == "adapters"
