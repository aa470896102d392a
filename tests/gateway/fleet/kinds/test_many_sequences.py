"""Requests with several prompts or choices at a server that serves its sequences first come, first served."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from testing.gateway.running import Client, Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.fleet.kinds.test_vllm import key_file, running_is, served, waiting_is

__all__ = ["served"]

pytestmark = pytest.mark.usefixtures("quick_polls")

ONE = [1, 2, 3]


@pytest.mark.parametrize("both", ["?requests=8"], indirect=True)
@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        ({"prompt": [ONE] * 1000, "max_tokens": 190, "stream": True}, "prompt", "1000 sequences"),
        ({"prompt": [ONE] * 5}, "prompt", "5 sequences"),
        ({"n": 5}, "n", "5 sequences"),
        ({"n": 5, "best_of": 5}, "n", "5 sequences"),
        ({"prompt": [ONE] * 3, "n": 2}, "prompt", "6 sequences"),
    ],
)
async def test_a_request_of_more_than_half_a_batch_is_refused(
    both: tuple[Gateway, VllmDouble], body: dict[str, Any], param: str, expected: str
):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    got = await acme.complete(**body)
    assert (got.status, got.error["param"]) == (400, param), got.body
    assert expected in got.error["message"]
    assert "at most 4" in got.error["message"]
    assert vllm.requests == []
    # The refusal takes no place.
    assert (await acme.complete(prompt=[ONE] * 4)).status == 200


@pytest.mark.parametrize("both", ["?requests=8"], indirect=True)
async def test_a_refusal_for_too_many_sequences_costs_nothing(both: tuple[Gateway, VllmDouble]):
    gateway, _ = both
    acme = await gateway.tenant("acme", requests_per_minute=1)
    for _ in range(3):
        assert (await acme.complete(prompt=[ONE] * 5)).status == 400
    assert (await acme.complete(prompt=[ONE] * 4)).status == 200
    await until(lambda: has_usage(acme, 1))


async def has_usage(client: Client, requests: int) -> bool:
    return sum(row["requests"] for row in await client.usage()) == requests


@pytest.mark.parametrize("both", ["?requests=8"], indirect=True)
async def test_a_server_never_gets_more_sequences_than_it_runs(both: tuple[Gateway, VllmDouble]):
    """The test waits for a poll of the server, whose count of running sequences shows no other gateway's requests."""
    gateway, vllm = both
    vllm.max_num_seqs = 8
    one, two, modest = [await gateway.tenant(name) for name in ("one", "two", "modest")]
    vllm.hold.clear()
    try:
        many = [asyncio.create_task(flood.complete(prompt=[ONE] * 4, max_tokens=2)) for flood in (one, two) * 3]
        await until(lambda: running_is(vllm, 8))
        await until(lambda: waiting_is(gateway, 4))
        few = [asyncio.create_task(modest.complete(max_tokens=2)) for _ in range(2)]
        await until(lambda: waiting_is(gateway, 6))
        polls = vllm.polls
        await until(lambda: polled(vllm, polls + 2))
        assert (vllm.running, vllm.waiting) == (8, 0)
        assert (await engine_row(gateway))["in_flight"] == 2
    finally:
        vllm.hold.set()
    assert {got.status for got in await asyncio.gather(*many, *few)} == {200}
    assert vllm.most_running == 8
    # The modest tenant's requests are the next two: they wait only for the requests that ran already.
    [salt] = {salt for salt in vllm.served if vllm.served.count(salt) == 2}
    assert [index for index, each in enumerate(vllm.served) if each == salt] == [2, 3]


@pytest.mark.parametrize("both", ["?requests=8"], indirect=True)
async def test_a_tenant_alone_leaves_half_of_the_places_to_single_sequences(both: tuple[Gateway, VllmDouble]):
    """Its large requests end together, and a neighbour does not wait for that."""
    gateway, vllm = both
    flood, modest = await gateway.tenant("flood"), await gateway.tenant("modest")
    vllm.hold.clear()
    try:
        many = [asyncio.create_task(flood.complete(prompt=[ONE] * 4, max_tokens=2)) for _ in range(3)]
        await until(lambda: running_is(vllm, 4))
        await until(lambda: waiting_is(gateway, 2))
        few = [asyncio.create_task(modest.complete(max_tokens=2)) for _ in range(4)]
        await until(lambda: running_is(vllm, 8))
        await until(lambda: waiting_is(gateway, 2))
    finally:
        vllm.hold.set()
    assert {got.status for got in await asyncio.gather(*many, *few)} == {200}


async def polled(vllm: VllmDouble, polls: int) -> bool:
    return vllm.polls >= polls


async def engine_row(gateway: Gateway) -> dict[str, Any]:
    return (await gateway.admin.get("/admin/api/engines")).json["data"][0]


@pytest.mark.parametrize("both", ["?requests=8"], indirect=True)
async def test_a_request_of_several_sequences_does_not_look_like_another_gateways(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    flood, modest = await gateway.tenant("flood"), await gateway.tenant("modest")
    vllm.hold.clear()
    try:
        first = asyncio.create_task(flood.complete(n=4, max_tokens=2))
        await until(lambda: running_is(vllm, 4))
        polls = vllm.polls
        await until(lambda: polled(vllm, polls + 2))
        others = [asyncio.create_task(modest.complete(max_tokens=2)) for _ in range(4)]
        # Four places are free, so all four get one.
        await until(lambda: running_is(vllm, 8))
    finally:
        vllm.hold.set()
    assert {got.status for got in await asyncio.gather(first, *others)} == {200}


@pytest.mark.parametrize("both", ["?requests=8"], indirect=True)
async def test_a_request_with_many_sequences_gets_its_turn_beside_an_endless_flow_of_others(
    both: tuple[Gateway, VllmDouble],
):
    gateway, vllm = both
    flood, batch = await gateway.tenant("flood"), await gateway.tenant("batch")
    done = asyncio.Event()

    async def flow() -> None:
        while not done.is_set():
            assert (await flood.complete(max_tokens=2)).status == 200

    async with asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(flow())
        try:
            await until(lambda: has_served(vllm, 20))
            assert await answers(batch, prompt=[ONE] * 4) == 200
        finally:
            done.set()


async def has_served(vllm: VllmDouble, number: int) -> bool:
    return len(vllm.served) >= number


async def answers(client: Client, **body: Any) -> int:
    async with asyncio.timeout(30):
        return (await client.complete(max_tokens=2, **body)).status


async def test_a_request_too_large_for_one_kind_goes_to_our_engine(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as ours, VllmDouble().serving() as vllm:
        engines = [f"vllm+{vllm.url}?requests=8&key_file={key_file(tmp_path)}", ours.url]
        async with running(settings(tmp_path, model_dir, engines, redis_url, redis_timeout=30.0)) as gateway:
            acme = await gateway.tenant("acme")
            for _ in range(4):
                assert (await acme.complete(prompt=[ONE] * 5, max_tokens=2)).status == 200
            assert (len(ours.requests), len(vllm.requests)) == (4, 0)
            ours.refuses = (503, "engine_unavailable")
            got = await acme.complete(prompt=[ONE] * 5, max_tokens=2)
            # Our engine may come back, so the request is not at fault.
            assert (got.status, got.error["code"]) == (503, "no_engine")
            assert vllm.requests == []


async def test_a_request_that_only_an_absent_server_takes_is_refused_at_once_and_blocks_nobody(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    async with VllmDouble().serving() as large, VllmDouble().serving() as small:
        key = f"key_file={key_file(tmp_path)}"
        engines = [f"vllm+{large.url}?requests=32&{key}", f"vllm+{small.url}?requests=4&{key}"]
        of = settings(tmp_path, model_dir, engines, redis_url, redis_timeout=30.0, queue_seconds=1000.0)
        async with running(of) as gateway:
            acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
            assert await answers(acme, n=10) == 200
            # The gateway sends nothing to this release.
            large.version = "0.20.0"
            await gateway.engines_up(1)
            small.hold.clear()
            try:
                asked = [asyncio.create_task(globex.complete(max_tokens=2)) for _ in range(5)]
                await until(lambda: waiting_is(gateway, 1))
                got = await acme.complete(n=10, max_tokens=2)
                assert (got.status, got.error["code"]) == (503, "no_engine")
            finally:
                small.hold.set()
            assert {got.status for got in await asyncio.gather(*asked)} == {200}


async def test_others_go_to_another_server_while_one_is_kept_free(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    async with VllmDouble().serving() as one, VllmDouble().serving() as two:
        engines = [f"vllm+{each.url}?requests=8&key_file={key_file(tmp_path)}" for each in (one, two)]
        of = settings(tmp_path, model_dir, engines, redis_url, redis_timeout=30.0, queue_seconds=1000.0)
        async with running(of) as gateway:
            await gateway.engines_up(2)
            busy, also, batch, new = [await gateway.tenant(name) for name in ("busy", "also", "batch", "new")]
            one.hold.clear()
            two.hold.clear()
            try:
                many = [asyncio.create_task(each.complete(n=3, max_tokens=2)) for each in (busy, also) * 2]
                await until(lambda: running_are(one, two, 12))
                many += [asyncio.create_task(busy.complete(max_tokens=2))]
                await until(lambda: running_are(one, two, 13))
                monkeypatch.setattr("gateway.fleet.queueing.queue.PASS_SECONDS", 0.0)
                large = asyncio.create_task(batch.complete(n=4, max_tokens=2))
                await until(lambda: waiting_is(gateway, 1))
                few = [asyncio.create_task(new.complete(max_tokens=2))]
                await until(lambda: running_are(one, two, 14))
                # The other server has more requests, and gets it nevertheless.
                assert sorted((one.running, two.running)) == [6, 8]
                few += [asyncio.create_task(new.complete(max_tokens=2))]
                await until(lambda: waiting_is(gateway, 2))
            finally:
                one.hold.set()
                two.hold.set()
            assert {got.status for got in await asyncio.gather(*many, large, *few)} == {200}


async def running_are(one: VllmDouble, two: VllmDouble, number: int) -> bool:
    return one.running + two.running == number
