"""Adapters of several tenants on a foreign server with room for few."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import NoReturn

import pytest
from redis.asyncio import Redis

from gateway.fleet.kinds.last_uses import LastUses
from gateway.fleet.kinds.unloading import STALE_S, victims
from testing.gateway.running import Gateway, until
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.fleet.kinds.test_vllm import adapters, served

__all__ = ["served"]


@pytest.mark.parametrize("both", ["?adapters=4"], indirect=True)
async def test_a_tenant_that_cycles_through_many_adapters_unloads_its_own(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    cycling, neighbour = await gateway.tenant("cycling"), await gateway.tenant("neighbour")
    [own] = await adapters(neighbour, 1)
    assert (await neighbour.complete(model=own)).status == 200
    [loaded] = vllm.loads
    many = await adapters(cycling, 6)
    for _ in range(3):
        for name in many[1:]:
            assert (await cycling.complete(model=name)).status == 200
        assert (await neighbour.complete(model=own)).status == 200
    assert vllm.loads.count(loaded) == 1
    assert len(vllm.names) == 4


@pytest.mark.parametrize("both", ["?adapters=16"], indirect=True)
async def test_loads_of_a_tenant_leave_the_server_to_those_of_others(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    cycling, neighbour = await gateway.tenant("cycling"), await gateway.tenant("neighbour")
    many, [own] = await adapters(cycling, 6), await adapters(neighbour, 1)
    vllm.hold_loads.clear()
    try:
        asked = [asyncio.create_task(cycling.complete(model=name)) for name in many[1:]]
        await until(lambda: has_loads(vllm, 2))
        asked.append(asyncio.create_task(neighbour.complete(model=own)))
        await until(lambda: has_loads(vllm, 3))
    finally:
        vllm.hold_loads.set()
    assert {got.status for got in await asyncio.gather(*asked)} == {200}
    # The neighbour's load was the third that the server got, though five others were asked for before it.
    assert vllm.most_loading == 3


async def has_loads(vllm: VllmDouble, number: int) -> bool:
    return len(vllm.loads) >= number


def test_the_least_recently_used_adapter_is_unloaded_while_no_tenant_holds_many_more():
    uses = {"a1": {"a": 1.0}, "b1": {"b": 2.0}, "b2": {"b": 3.0}, "a2": {"a": 4.0}}
    assert victims(list(uses), uses, uses, 2) == ["a1", "b1"]


def test_the_tenant_with_the_most_adapters_unloads_first_also_beside_its_busy_ones():
    uses = {"b1": {"b": 0.0}, **{f"a{number}": {"a": 1.0 + number} for number in range(5)}}
    idle = ["b1", "a1", "a3"]
    assert victims(idle, uses, uses, 2) == ["a1", "a3"]


def test_an_adapter_unused_for_long_or_of_an_unknown_tenant_is_unloaded_first():
    uses = {"b1": {"b": 1.0}, **{f"a{number}": {"a": STALE_S + 2.0 + number} for number in range(5)}}
    assert victims([*uses, "x"], [*uses, "x"], uses, 2) == ["x", "b1"]


def test_an_adapter_of_two_tenants_counts_for_the_one_with_the_last_use():
    uses = {"b1": {"a": 0.0, "b": 1.5}, **{f"a{number}": {"a": 2.0 + number} for number in range(5)}}
    assert victims(list(uses), uses, uses, 1) == ["a0"]


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        yield client


async def test_gateways_know_the_tenants_of_each_others_uses(redis: Redis):
    one, two = LastUses(redis, 10.0), LastUses(redis, 10.0)
    one.note("http://tenants", "x", "acme")

    async def is_known() -> bool:
        return "acme" in (await two.all("http://tenants")).get("x", {})

    await until(is_known)
    # A long answer's use is noted again without its tenant.
    before = (await two.all("http://tenants"))["x"]["acme"]
    await asyncio.sleep(0.01)
    one.note_again("http://tenants", "x")
    assert (await one.all("http://tenants"))["x"]["acme"] > before


class Unscanned(dict[str, float]):
    def __iter__(self) -> Iterator[str]:
        return self._fail()

    def items(self) -> NoReturn:
        self._fail()

    def _fail(self) -> NoReturn:
        raise AssertionError("all uses of an hour were read")


async def test_a_use_is_noted_again_for_its_last_tenant_without_a_search(monkeypatch: pytest.MonkeyPatch):
    """Each poll of a server notes all its running adapters again."""
    uses = LastUses(None, 1.0)
    for digest, tenant in (("x", "first"), ("x", "last"), ("y", "first")):
        uses.note("http://s", digest, tenant)
    before = dict(uses._own["http://s"])
    uses._own["http://s"] = Unscanned(before)
    monkeypatch.setattr("gateway.fleet.kinds.last_uses.time.time", lambda: max(before.values()) + 9.0)
    uses.note_again("http://s", "x")
    uses.note_again("http://s", "z")
    own = uses._own["http://s"] = dict.copy(uses._own["http://s"])
    assert {member for member in own if own[member] != before.get(member)} == {"x:last", "z:"}


async def test_what_is_known_of_a_use_is_forgotten_with_it(monkeypatch: pytest.MonkeyPatch):
    uses = LastUses(None, 1.0)
    uses.note("http://s", "x", "acme")
    monkeypatch.setattr("gateway.fleet.kinds.last_uses.KEEP_SECONDS", -1.0)
    assert await uses.all("http://s") == {}
    assert uses._last == {"http://s": {}}
