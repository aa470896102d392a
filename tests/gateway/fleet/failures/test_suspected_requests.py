"""A request that kills engines beside other tenants' requests: it is found, and the others are served."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.failures.deaths import LIMITS, ONE_DEATH_SECONDS, TENANT
from gateway.fleet.failures.quarantine import Quarantine, Quarantined
from testing.gateway.running import becomes, running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.failures.test_quarantine import BODY, SECRET, Clock, die, engine, is_quarantined, note_death

POISON = "what ends engines"
# Time for which a double is down. Its deaths have instances, so they may follow each other within ONE_DEATH_SECONDS.
DOWN_SECONDS = 0.75


async def apart(quarantine: Quarantine, tenant: str = "a", **body: Any) -> set[str]:
    """Return the tenants of the suspicion against a request."""
    found = await quarantine.suspicion(tenant, (), NamedBody(BODY | body))
    return set() if found is None else found.others


async def test_a_request_runs_apart_from_the_tenants_of_its_deaths_until_it_has_run_so():
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    die(quarantine, clock, engine(a=1, b=1, c=1))
    assert await apart(quarantine) == set()
    die(quarantine, clock, engine(a=1, b=1, d=1))
    assert await quarantine.suspicion("a", (), NamedBody(BODY)) == ({"b"}, 2)
    assert await apart(quarantine, prompt="another") == set()
    assert await apart(quarantine, tenant="b") == set()
    await quarantine.note_survived("a", (), NamedBody(BODY))
    assert await apart(quarantine) == set()
    die(quarantine, clock, engine(a=1, b=1))
    assert await apart(quarantine) == {"b"}, "it kills engines only sometimes"
    die(quarantine, clock, engine(a=1))
    assert await apart(quarantine) == set()
    assert is_quarantined(quarantine)


async def test_a_death_by_a_request_in_quarantine_makes_no_other_suspected():
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    for _ in range(2):
        clock.now += 10.0
        record = engine(a=1, b=1)
        note_death(quarantine, record, "a")
        note_death(quarantine, record, "b")
    assert (await apart(quarantine), await apart(quarantine, tenant="b")) == ({"b"}, {"a"})
    assert not await quarantine.is_innocent("b", (), NamedBody(BODY))
    die(quarantine, clock, engine("http://two:1", a=1))
    assert is_quarantined(quarantine)
    assert await apart(quarantine, tenant="b") == set()
    assert await quarantine.is_innocent("b", (), NamedBody(BODY))
    assert not await quarantine.is_innocent("a", (), NamedBody(BODY))
    assert not await quarantine.is_innocent("c", (), NamedBody(BODY))
    assert not is_quarantined(quarantine, tenant="b")


async def test_a_tenant_is_refused_after_four_deaths_by_its_requests_in_quarantine_without_others():
    """Further requests of its own on the same engines stay suspected: each may be a cause as well."""
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    for _ in range(2):
        clock.now += 10.0
        record = engine(a=4, b=1)
        for number in range(4):
            note_death(quarantine, record, "a", prompt=f"{number}")
        note_death(quarantine, record, "b")
    for number in range(4):
        assert not is_quarantined(quarantine, prompt="another")
        assert await apart(quarantine, prompt=f"{number}") == {"b"}
        clock.now += 10.0
        note_death(quarantine, engine(a=1), "a", prompt=f"{number}")
    with pytest.raises(Quarantined) as caught:
        await quarantine.check("a", (), NamedBody(BODY | {"prompt": "another"}))
    assert (caught.value.status, caught.value.code) == (422, "tenant_quarantined")
    assert caught.value.headers == {"Retry-After": "70"}
    with pytest.raises(Quarantined):
        quarantine.check_adapter("a", "d")
    assert not is_quarantined(quarantine, tenant="b")
    assert await apart(quarantine, tenant="b") == set()
    clock.now += 101.0
    assert not is_quarantined(quarantine, prompt="another")


async def test_a_single_death_is_enough_if_the_tenant_has_another_request_in_quarantine():
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    clock.now += ONE_DEATH_SECONDS
    note_death(quarantine, engine("http://two:1", a=1, b=1), "a", prompt="another")
    die(quarantine, clock, engine(a=1))
    assert await apart(quarantine, prompt="another") == set()
    die(quarantine, clock, engine(a=1))
    assert await apart(quarantine, prompt="another") == {"b"}
    assert await apart(quarantine, prompt="one without a death") == set()


async def test_deaths_beside_others_quarantine_no_tenant():
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    for number in range(20):
        clock.now += ONE_DEATH_SECONDS
        note_death(quarantine, engine(a=1, b=1), "a", prompt=f"{number // 3}")
    assert not is_quarantined(quarantine, prompt="another")


async def test_deaths_that_are_forgotten_make_nothing_suspected():
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    for _ in range(2):
        die(quarantine, clock, engine(a=1, b=1))
    assert await apart(quarantine) == {"b"}
    clock.now += 101.0
    assert await apart(quarantine) == set()


def test_an_engine_that_died_lately_cannot_show_another_death():
    quarantine, record = Quarantine(100.0, SECRET, clock=(clock := Clock())), engine(a=1)
    assert not quarantine.died_lately(record)
    die(quarantine, clock, record)
    assert quarantine.died_lately(record)
    clock.now += ONE_DEATH_SECONDS
    assert not quarantine.died_lately(record)


class Mortal(Upstream):
    """Engine double that dies of a prompt: it breaks off all requests. Its next instance is there after a time."""

    def __init__(self) -> None:
        super().__init__()
        self.deaths = 0
        self._connections = Counter[asyncio.Transport]()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        transport = request.transport
        self._connections[transport] += 1
        try:
            if POISON in await request.text():
                if self.healthy:
                    self.deaths += 1
                    self.instance = f"after {self.deaths}"
                    self.healthy = False
                    asyncio.get_running_loop().call_later(DOWN_SECONDS, setattr, self, "healthy", True)
                for each in self._connections:
                    each.abort()
                return web.Response()
            return await super()._generate(request)
        finally:
            self._connections -= Counter([transport])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine die again soon."""
    monkeypatch.setattr("gateway.fleet.failures.deaths.ONE_DEATH_SECONDS", DOWN_SECONDS / 2)
    monkeypatch.setattr("gateway.fleet.failures.quarantine.ONE_DEATH_SECONDS", DOWN_SECONDS / 2)


@asynccontextmanager
async def mortal_fleet(number: int, folder: Path, model_dir: Path, redis_url: str) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(Mortal().serving()) for _ in range(number)]
        gateway = await stack.enter_async_context(
            running(settings(folder, model_dir, [each.url for each in fleet], redis_url, redis_timeout=30.0))
        )
        yield gateway, fleet


@asynccontextmanager
async def asking(client: Any, lanes: int, fleet: list[Mortal]) -> AsyncIterator[list[int]]:
    """Send requests on several lanes until the block ends. It begins when each engine has one. Yield the statuses."""
    statuses: list[int] = []
    goes_on = True

    async def ask(lane: int) -> None:
        while goes_on:
            body = {"prompt": f"{lane} {len(statuses)}", "x_engine": {"tokens": 4, "delay": 0.05}}
            statuses.append((await client.complete(max_tokens=4, **body)).status)

    tasks = [asyncio.create_task(ask(lane)) for lane in range(lanes)]
    await becomes(lambda: all(each._active for each in fleet))
    yield statuses
    goes_on = False
    await asyncio.gather(*tasks)


@pytest.mark.usefixtures("quick")
async def test_a_request_that_kills_engines_beside_others_is_found_and_the_others_are_served(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    """The neighbour has requests on each engine at all times: some of them were on two engines that died."""
    async with mortal_fleet(3, tmp_path, model_dir, redis_url) as (gateway, fleet):
        acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
        async with asking(other, 9, fleet) as answers:
            statuses = []
            while not statuses or statuses[-1] != 422:
                statuses.append((await acme.complete(prompt=POISON)).status)
                assert len(statuses) < 4, statuses
            assert sum(each.deaths for each in fleet) == 3
            served = len(answers)
            await becomes(lambda: len(answers) > served + 9)
        assert set(answers) == {200}
        assert (await acme.complete(prompt="another")).status == 200


@pytest.mark.usefixtures("quick")
async def test_a_tenant_with_several_requests_that_kill_engines_is_refused(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    async with mortal_fleet(3, tmp_path, model_dir, redis_url) as (gateway, fleet):
        acme, other = await gateway.tenant("acme"), await gateway.tenant("other")

        async def kill(number: int) -> None:
            codes: list[str] = []
            while "tenant_quarantined" not in codes:
                got = await acme.complete(prompt=f"{POISON} {number}")
                codes.append(got.error["code"])
                await asyncio.sleep(0.05)

        async with asking(other, 6, fleet) as statuses:
            async with asyncio.timeout(100.0):
                await asyncio.gather(*(kill(number) for number in range(8)))
            # Each has at most two deaths beside others. Those on the kept engine show the causes.
            deaths = sum(each.deaths for each in fleet)
            assert deaths <= 2 * 8 + LIMITS[TENANT]
            assert (await acme.complete(prompt="another")).error["code"] == "tenant_quarantined"
            assert (await acme.complete(prompt=POISON)).error["code"] == "tenant_quarantined"
            assert sum(each.deaths for each in fleet) == deaths
            served = statuses.count(200)
            await becomes(lambda: statuses.count(200) > served + 9)
        metrics = (await gateway.admin.get("/metrics")).body.decode()
        assert 'loraplex_gateway_quarantined_total{kind="tenant"} 1.0' in metrics


@pytest.mark.usefixtures("quick")
async def test_the_only_engine_serves_others_while_a_suspected_request_waits(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    async with mortal_fleet(1, tmp_path, model_dir, redis_url) as (gateway, [upstream]):
        acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
        statuses: list[int] = []
        goes_on = True

        async def ask(lane: int) -> None:
            while goes_on:
                # The lanes have different periods, so they seldom end at one moment and leave the engine free.
                how = {"tokens": 4, "delay": 0.1 + 0.03 * lane}
                answer = await other.complete(prompt=f"{lane} {len(statuses)}", max_tokens=4, x_engine=how)
                statuses.append(answer.status)
                await asyncio.sleep(0.01)

        async def are_served() -> bool:
            return statuses[-10:] == [200] * 10

        asking = [asyncio.create_task(ask(lane)) for lane in range(4)]
        for _ in range(2):
            await until(are_served)
            assert (await acme.complete(prompt=POISON)).error["code"] == "engine_died"
            statuses.clear()
        await until(are_served)
        poisoning = asyncio.create_task(acme.complete(prompt=POISON))
        statuses.clear()
        await until(are_served)
        assert (upstream.deaths, poisoning.done()) == (2, False)
        goes_on = False
        await asyncio.gather(*asking)
        assert (await poisoning).error["code"] == "request_quarantined"
        assert upstream.deaths == 3
