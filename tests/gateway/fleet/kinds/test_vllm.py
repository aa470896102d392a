"""vLLM servers behind the gateway, by a double with vLLM's protocol."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.fleet.kinds.last_uses import LastUses
from testing.gateway.foreign_double import PROMPT_TOKENS
from testing.gateway.running import BASE_MODEL, Client, Gateway, running, running_alone, settings, until
from testing.gateway.upstream import TOKEN
from testing.gateway.vllm_double import API_KEY, VllmDouble
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.test_left_clients import hold
from wire.responses import FIELDS_HEADER


@asynccontextmanager
async def served(
    folder: Path, model_dir: Path, redis_url: str, migrated: Path, options: str = "", **settled: object
) -> AsyncIterator[tuple[Gateway, VllmDouble]]:
    async with VllmDouble().serving() as vllm:
        shutil.copy(migrated, folder / "gateway.db")
        options = f"{options or '?'}&key_file={key_file(folder)}"
        # On a slow machine no call to Redis may time out, because a refused request would never reach the queue, and no
        # request may leave the queue, because tests count the waiting ones.
        settled = {"redis_timeout": 30.0, "queue_seconds": 1000.0} | settled
        of = settings(folder, model_dir, [f"vllm+{vllm.url}{options}"], redis_url, migrate_on_start=False, **settled)
        async with running_alone(of) as gateway:
            yield gateway, vllm


def key_file(folder: Path) -> Path:
    path = folder / "vllm.key"
    path.write_text(API_KEY + "\n")
    return path


@pytest.fixture
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query the server's list of models only at the gateway's start, not later."""
    monkeypatch.setattr("gateway.fleet.discovery.registry.POLL_SECONDS", 3600.0)


async def billed(client: Client, expected: tuple[int, int, int]) -> bool:
    """Return whether the tenant's rows sum to this many requests, prompt and completion tokens."""
    rows = await client.usage()
    return expected == tuple(sum(row[k] for row in rows) for k in ("requests", "prompt_tokens", "completion_tokens"))


async def adapters(client: Client, number: int) -> list[str]:
    """Push this many new adapters, each with different content, and return their names."""
    names = [f"adapter-{seed}" for seed in range(number)]
    for seed, name in enumerate(names):
        assert (await push(client, name, files(seed))).status == 201
    return names


async def test_the_base_model_is_asked_as_vllm_knows_it(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    got = await acme.complete(max_tokens=3)
    assert (got.status, got.json["model"], got.json["choices"][0]["text"]) == (200, BASE_MODEL, "aaa")
    [(headers, body)] = vllm.requests
    assert body["model"] == BASE_MODEL
    # The tenant's own salt, which does not identify the tenant.
    own_salt = body["cache_salt"]
    assert own_salt
    assert headers["authorization"] == f"Bearer {API_KEY}"
    assert headers["x-request-id"] == got.headers["x-request-id"]
    await until(lambda: billed(acme, (1, PROMPT_TOKENS, 3)))
    # The internal token opens our own engines; vLLM must not see it.
    assert TOKEN not in str(vllm.requests)


async def test_an_adapter_is_loaded_once_for_all_who_wait_and_its_name_is_the_tenants(
    both: tuple[Gateway, VllmDouble],
):
    gateway, vllm = both
    vllm.load_seconds = 0.2
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    answers = await asyncio.gather(*(acme.complete(model=name, max_tokens=2) for _ in range(6)))
    assert [(got.status, got.json["model"]) for got in answers] == [(200, name)] * 6
    assert len(vllm.loads) == 1
    assert vllm.loads[0].startswith("sha256:")
    assert {body["model"] for _, body in vllm.requests} == set(vllm.loads)


async def test_a_stream_is_billed_and_shows_nothing_of_vllms_own(both: tuple[Gateway, VllmDouble]):
    gateway, _ = both
    acme = await gateway.tenant("acme")
    got = await acme.complete(max_tokens=3, stream=True)
    assert got.events[-1] == "[DONE]"
    assert "".join(choice["text"] for event in got.events[:-1] for choice in event["choices"]) == "aaa"
    assert all("usage" not in event and event["model"] == BASE_MODEL for event in got.events[:-1])
    await until(lambda: billed(acme, (1, PROMPT_TOKENS, 3)))


async def test_how_far_a_stream_is_is_asked_only_where_the_answer_is_of_all_choices(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    assert (await acme.complete(stream=True)).status == 200
    assert (await acme.complete(stream=True, n=2)).status == 200
    assert (await acme.complete(stream=True, prompt=["Hi", "Ho"])).status == 200
    asked = [body["stream_options"].get("continuous_usage_stats", False) for _, body in vllm.requests]
    assert asked == [True, False, False]


async def test_a_name_that_another_gateway_took_away_is_loaded_again(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    assert (await acme.complete(model=name, max_tokens=3)).status == 200
    vllm.names.clear()
    got = await acme.complete(model=name, max_tokens=3)
    assert got.status == 200
    assert len(vllm.loads) == 2
    await until(lambda: billed(acme, (2, 2 * PROMPT_TOKENS, 2 * 3)))


async def test_a_name_that_another_gateway_loaded_is_taken_as_it_is(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    assert (await acme.complete(model=name)).status == 200
    [loaded] = vllm.loads

    # Removed, then loaded again by another gateway before this gateway's next query.
    class Back(dict[str, str]):
        def __contains__(self, key: object) -> bool:
            first, self.first = self.first, False
            return not first and super().__contains__(key)

        first = True

    vllm.names = Back(vllm.names)
    assert (await acme.complete(model=name)).status == 200
    assert vllm.loads == [loaded, loaded]


@pytest.mark.parametrize("both", ["?adapters=2"], indirect=True)
async def test_no_more_names_are_kept_than_the_option_allows(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    first, second, third = await adapters(acme, 3)
    for name in (first, second, first, third):
        assert (await acme.complete(model=name)).status == 200
    # The least recently used adapter is evicted.
    assert vllm.unloads == [vllm.loads[1]]
    assert len(vllm.names) == 2
    assert (await acme.complete(model=second)).status == 200
    assert len(vllm.names) == 2


@pytest.mark.parametrize("both", ["?adapters=1"], indirect=True)
async def test_who_asks_for_an_adapter_on_its_way_out_gets_it_loaded_after_that(
    asked_once: None, both: tuple[Gateway, VllmDouble]
):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    first, second = await adapters(acme, 2)
    assert (await acme.complete(model=first)).status == 200
    vllm.hold_unloads.clear()
    other = asyncio.create_task(acme.complete(model=second))

    async def leaving() -> bool:
        return len(vllm.unloads) == 1

    await until(leaving)
    again = asyncio.create_task(acme.complete(model=first))
    await until(lambda: in_flight(gateway, 2))
    vllm.hold_unloads.set()
    assert [got.status for got in await asyncio.gather(other, again)] == [200, 200]
    # Loaded once more after its eviction: no request used a missing name.
    assert [name for name in vllm.loads if name == vllm.loads[0]] == [vllm.loads[0]] * 2
    assert len(vllm.requests) == 3


@pytest.mark.parametrize("both", ["?adapters=1"], indirect=True)
async def test_a_client_that_leaves_after_its_load_does_not_fill_the_server(
    both: tuple[Gateway, VllmDouble], monkeypatch: pytest.MonkeyPatch
):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    first, second = await adapters(acme, 2)
    assert (await acme.complete(model=first)).status == 200
    held = hold(monkeypatch, LastUses, "all")
    await held.leave(gateway, acme.complete(model=second))

    async def is_within_limit() -> bool:
        return len(vllm.loads) == 2 and len(vllm.names) == 1

    await until(is_within_limit)


async def test_an_adapter_that_one_server_cannot_load_another_may(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    shutil.copy(migrated, tmp_path / "gateway.db")
    async with VllmDouble().serving() as one, VllmDouble().serving() as two:
        key = key_file(tmp_path)
        urls = [f"vllm+{one.url}?key_file={key}", f"vllm+{two.url}?key_file={key}"]
        of = settings(tmp_path, model_dir, urls, redis_url, migrate_on_start=False, redis_timeout=30.0)
        async with running(of) as gateway:
            acme = await gateway.tenant("acme")
            one.fail_loads = "no space left"
            for name in await adapters(acme, 8):
                assert (await acme.complete(model=name)).status == 200
            assert one.requests == []
            assert len(two.requests) == 8


async def in_flight(gateway: Gateway, number: int) -> bool:
    return (await gateway.admin.get("/admin/api/engines")).json["data"][0]["in_flight"] == number


async def test_what_vllm_refuses_is_told_in_the_clients_terms(
    both: tuple[Gateway, VllmDouble], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.kinds.runtime_adapters.FAILURE_SECONDS", 0.0)
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    vllm.fail_loads = "Call to add_lora method failed: LoRA rank 64 is greater than max_lora_rank 16."
    got = await acme.complete(model=name)
    assert (got.status, got.error["code"]) == (400, "adapter_rank_not_served")
    vllm.fail_loads = "Call to add_lora method failed: /adapters/x is damaged."
    got = await acme.complete(model=name)
    assert (got.status, got.error["code"]) == (502, "engine_error")
    assert "/" not in got.error["message"]
    vllm.fail_loads = None
    assert (await acme.complete(model=name)).status == 200
    await until(lambda: in_flight_is(gateway, 0))
    assert (await gateway.nobody.get("/readyz")).json["engines_up"] == 1


async def in_flight_is(gateway: Gateway, number: int) -> bool:
    return (await gateway.admin.get("/admin/api/engines")).json["data"][0]["in_flight"] == number


@pytest.mark.parametrize("both", ["?requests=2"], indirect=True)
async def test_tenants_share_it_fairly_for_it_is_given_only_what_it_runs(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    flood, modest = await gateway.tenant("flood"), await gateway.tenant("modest")
    vllm.hold.clear()
    try:
        many = [asyncio.create_task(flood.complete(max_tokens=20)) for _ in range(20)]
        await until(lambda: running_is(vllm, 2))
        await until(lambda: waiting_is(gateway, 18))
        few = [asyncio.create_task(modest.complete(max_tokens=20)) for _ in range(3)]
        await until(lambda: waiting_is(gateway, 21))
    finally:
        # Without this a failure here would make the gateway wait for its requests for ever.
        vllm.hold.set()
    assert {got.status for got in await asyncio.gather(*many, *few)} == {200}
    assert vllm.most_running == 2
    [salt] = {salt for salt in vllm.served if vllm.served.count(salt) == 3}
    # The late tenant with few requests does not wait for the other's twenty: it gets at least every second slot.
    assert max(i for i, tenant in enumerate(vllm.served) if tenant == salt) < 12


async def running_is(vllm: VllmDouble, number: int) -> bool:
    return vllm.running == number


async def waiting_is(gateway: Gateway, number: int) -> bool:
    page = (await gateway.admin.get("/metrics")).body.decode()
    return f"loraplex_gateway_queue_waiting {float(number)}" in page


async def test_the_lowest_priority_is_refused_first_when_the_queue_is_full(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    pair = served(tmp_path, model_dir, redis_url, migrated, "?requests=1", queue_length=1, queue_seconds=1000)
    async with pair as (gateway, vllm):
        low, high = await gateway.tenant("low", priority=9), await gateway.tenant("high", priority=0)
        vllm.hold.clear()
        first = asyncio.create_task(low.complete(max_tokens=2))
        await until(lambda: running_is(vllm, 1))
        second = asyncio.create_task(low.complete(max_tokens=2))
        await until(lambda: waiting_is(gateway, 1))
        third = asyncio.create_task(high.complete(max_tokens=2))
        shed = await second
        assert (shed.status, shed.error["code"]) == (429, "server_overloaded")
        assert int(shed.headers["Retry-After"]) >= 1
        late = await low.complete(max_tokens=2)
        assert late.status == 429
        vllm.hold.set()
        assert [(await task).status for task in (first, third)] == [200, 200]


async def test_a_header_of_our_engine_is_not_believed(
    both: tuple[Gateway, VllmDouble], monkeypatch: pytest.MonkeyPatch
):
    """A foreign server's answer is decoded, whatever lengths of its fields it says."""
    gateway, vllm = both
    plain = vllm._answer

    async def answer(*args: Any) -> web.StreamResponse:
        response = await plain(*args)
        response.headers[FIELDS_HEADER] = '{"id":1}'
        return response

    monkeypatch.setattr(vllm, "_answer", answer)
    got = await (await gateway.tenant("acme")).complete(max_tokens=3)
    assert (got.status, got.json["choices"][0]["text"]) == (200, "aaa")
