"""Tenants whose requests kill engines, each request another one: they run apart until they are refused or cleared."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.failures import isolation, tenant_turns
from gateway.fleet.failures.deaths import LIMITS, SUSPECTED_DEATHS, TENANT
from gateway.fleet.failures.isolation import Isolation, NotAlone
from gateway.fleet.failures.kept_engine import KeptEngine
from gateway.fleet.failures.quarantine import Quarantine
from gateway.fleet.failures.tenant_turns import TenantTurns
from gateway.process.background import running as in_background
from gateway.redis.client import connect
from testing.gateway.running import Client, becomes, running, settings
from tests.gateway.fleet.failures.test_isolation import already_over, engines
from tests.gateway.fleet.failures.test_quarantine import SECRET, Clock, engine, note_death
from tests.gateway.fleet.failures.test_suspected_requests import DOWN_SECONDS, POISON, Mortal

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_turns, "STRETCH_SECONDS", 0.5)
    monkeypatch.setattr(isolation, "SHARING_SECONDS", 0.0)


@pytest.fixture
def any_second_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine that is back soon die again as soon."""
    monkeypatch.setattr("gateway.fleet.failures.death.ONE_DEATH_SECONDS", DOWN_SECONDS / 2)
    monkeypatch.setattr("gateway.fleet.failures.quarantine.ONE_DEATH_SECONDS", DOWN_SECONDS / 2)


@pytest.fixture
async def process(any_redis: Any) -> AsyncIterator["Process"]:
    """Yield a process with two engines."""
    process = Process(any_redis, engines("http://one:1", "http://two:1"))
    yield process
    await process.turns.close()


class Process:
    """A gateway process's turns over some engines, and its quarantine."""

    def __init__(self, redis: Any, fleet: list[EngineRecord], deployment: str = "") -> None:
        self.clock = Clock()
        self.fleet = fleet
        self.quarantine = Quarantine(600.0, SECRET, clock=self.clock)
        self.kept = KeptEngine(redis, deployment or uuid.uuid4().hex, lambda: True)
        self.isolation = Isolation(lambda base: fleet if base == "base" else [], self.kept)
        self.turns = TenantTurns(self.isolation, self.quarantine)
        self._numbers = itertools.count()

    def die(self, *tenants: str, at: EngineRecord | None = None) -> None:
        """Note the death of an engine with a new request of each tenant."""
        record = engine("http://former:1", **dict.fromkeys(tenants, 1)) if at is None else at
        for each in tenants:
            note_death(self.quarantine, record, each, prompt=f"{next(self._numbers)}")
        self.clock.now += 10.0 if at is None else 0.0

    def suspect(self, *tenants: str) -> None:
        for _ in range(SUSPECTED_DEATHS):
            self.die(*tenants)

    async def ask(self, tenant: str, over: asyncio.Event, base: str = "base") -> EngineRecord | None:
        """Send a request that runs until an event. Return its engine if it ran apart."""
        async with self.turns.engine(base, tenant, lambda _: True) as found:
            if found is not None:
                assert found.serves_only(tenant)
                with found.requests.count(None, tenant) as request:
                    await over.wait()
                    request.end()
            return found

    def is_suspected(self, tenant: str) -> bool:
        return self.quarantine.known.is_suspected(tenant, "base")


async def test_a_suspected_tenant_runs_apart_and_is_cleared(process: Process, quick: None):
    process.suspect("a", "b")
    over = asyncio.Event()
    first = asyncio.create_task(process.ask("a", over))
    await becomes(lambda: process.kept.is_open)
    [kept] = [each for each in process.fleet if not process.isolation.allows(each)]
    assert await process.ask("b", already_over()) is None, "a tenant without a turn runs as usual"
    assert await process.ask("c", already_over()) is None
    assert await process.ask("a", already_over()) is kept
    assert await process.ask("a", already_over(), base="another base") is None
    await asyncio.sleep(2 * tenant_turns.STRETCH_SECONDS)
    assert process.is_suspected("a"), "a request of the turn still runs"
    over.set()
    assert await first is kept
    await becomes(lambda: not process.is_suspected("a"))
    await becomes(lambda: not process.isolation.is_active)
    assert await process.ask("a", already_over()) is None
    assert process.is_suspected("b")
    await becomes(lambda: time.monotonic() > process.turns._next_at)
    assert await process.ask("b", already_over()) in process.fleet
    await becomes(lambda: not process.is_suspected("b"))


async def test_a_tenant_that_was_alone_at_a_death_waits_for_its_turns(
    process: Process, quick: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tenant_turns, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(isolation, "EMPTYING_SECONDS", 0.1)
    process.suspect("a", "b")
    for each in process.fleet:
        each.foreign_load = 1
    assert await process.ask("a", already_over()) is None, "no engine became free, so it runs as usual"
    process.die("a")
    with pytest.raises(NotAlone):
        await process.ask("a", already_over())
    assert await process.ask("b", already_over()) is None
    monkeypatch.setattr(tenant_turns, "WAIT_SECONDS", 30.0)
    for each in process.fleet:
        each.foreign_load = 0
    assert await process.ask("a", already_over()) in process.fleet


async def test_a_death_in_its_turn_clears_no_tenant(process: Process, quick: None):
    over = asyncio.Event()
    process.suspect("a", "b")
    asked = asyncio.create_task(process.ask("a", over))
    await becomes(lambda: process.kept.is_open)
    [kept] = [each for each in process.fleet if not process.isolation.allows(each)]
    process.die("a", at=kept)
    over.set()
    await asked
    await becomes(lambda: not process.isolation.is_active)
    assert process.is_suspected("a")
    assert process.quarantine.known.was_alone("a", "base")


async def test_no_tenant_has_a_turn_on_the_last_engine(process: Process, quick: None):
    process.suspect("a", "b")
    process.fleet[1].mark_down("it died")
    assert await process.ask("a", already_over()) is None
    process.fleet[1].mark_up()
    over = asyncio.Event()
    asked = asyncio.create_task(process.ask("a", over))
    await becomes(lambda: process.kept.is_open)
    [other] = [each for each in process.fleet if process.isolation.allows(each)]
    await becomes(lambda: any(each.requests.by_tenant["a"] for each in process.fleet))
    other.mark_down("it died")
    await becomes(lambda: not process.isolation.is_active)
    assert process.is_suspected("a"), "others' requests may have been there"
    over.set()
    await asked


async def test_all_processes_send_a_tenants_requests_to_its_engine(any_redis: Any, quick: None):
    deployment, over = uuid.uuid4().hex, asyncio.Event()
    one, two = (Process(any_redis, engines("http://one:1", "http://two:1"), deployment) for _ in range(2))
    for each in (one, two):
        each.suspect("a", "b")
    async with in_background(one.kept.watch()), in_background(two.kept.watch()):
        asked = asyncio.create_task(one.ask("a", over))
        await becomes(lambda: two.kept.is_open)
        found = await two.ask("a", already_over())
        assert found is not None
        assert found.url == one.kept.url
        assert await two.ask("b", already_over()) is None
        over.set()
        await asked
        await becomes(lambda: not one.is_suspected("a"))
    await one.turns.close()


async def test_without_redis_suspected_tenants_run_as_usual():
    redis = connect("redis://127.0.0.1:1/0", 0.2)
    process = Process(redis, engines("http://one:1"))
    process.suspect("a", "b")
    assert await process.ask("a", already_over()) is None
    await process.turns.close()
    await redis.aclose()


class Fading(Mortal):
    """Engine double that dies a moment after a prompt has begun to stream."""

    seats = 16

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        if POISON in body and '"stream"' in body:
            transport = request.transport
            assert transport is not None
            self._connections[transport] += 1
            asyncio.get_running_loop().call_later(0.05, self.die)
            return await super(Mortal, self)._generate(request)
        return await super()._generate(request)


class Attack:
    """Tenants whose streams kill engines beside honest ones, over two gateways."""

    def __init__(self) -> None:
        # Error codes and durations of the honest tenants' requests, error codes of the others'.
        self.honest: list[tuple[str | None, float]] = []
        self.refused: dict[str, set[str]] = {}
        self._numbers = itertools.count()

    async def ask(self, clients: list[Client], **how: Any) -> tuple[str | None, float]:
        number, started = next(self._numbers), time.monotonic()
        client = clients[number % len(clients)]
        engine_does = {"x_engine": {"tokens": 4, "delay": 0.05}}
        answer = await client.complete(max_tokens=4, stream=True, **engine_does | how)
        return (answer.error["code"] if answer.status != 200 else None), time.monotonic() - started

    async def be_honest(self, clients: list[Client]) -> None:
        while True:
            self.honest.append(await self.ask(clients, prompt=f"an honest one {next(self._numbers)}"))
            await asyncio.sleep(0.01)

    async def kill(self, name: str, clients: list[Client], lasts: float) -> None:
        """Kill engines until all requests are refused. Each request is another one and has begun to stream."""
        codes = self.refused.setdefault(name, set())
        until = time.monotonic() + lasts
        while "tenant_quarantined" not in codes and time.monotonic() < until:
            try:
                how = {"x_engine": {"tokens": 4, "delay": 0.5}}
                code, _ = await self.ask(clients, prompt=f"{POISON} {next(self._numbers)}", **how)
                codes.update({code} - {None})
            except OSError:
                codes.add("connection lost")
            await asyncio.sleep(0.2)


@asynccontextmanager
async def attacked(
    tmp_path: Path, model_dir: Path, redis_url: str, honest: list[str], killers: list[str]
) -> AsyncIterator[tuple[Attack, list[Fading], dict[str, list[Client]]]]:
    async with AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(Fading().serving()) for _ in range(4)]
        of = settings(tmp_path, model_dir, [each.url for each in fleet], redis_url, redis_timeout=30.0)
        gateways = [await stack.enter_async_context(running(of)) for _ in range(2)]
        tenants: dict[str, list[Client]] = {}
        for name in honest + killers:
            first = await gateways[0].tenant(name)
            tenants[name] = [first, gateways[1].client(first.key or "")]
        for each in gateways:
            await each.engines_up(len(fleet))
        attack = Attack()
        lanes = [asyncio.create_task(attack.be_honest(tenants[name])) for name in honest for _ in range(6)]
        try:
            yield attack, fleet, tenants
        finally:
            for each in lanes:
                each.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)


@pytest.mark.usefixtures("any_second_death")
@pytest.mark.parametrize(("honest", "killers"), [(["one", "two"], ["killer"]), (["one"], ["first", "second"])])
async def test_tenants_that_kill_with_another_request_each_time_are_refused_and_no_other_one(
    honest: list[str], killers: list[str], tmp_path: Path, model_dir: Path, redis_url: str
):
    """Two killers in turn would put a third tenant at each death."""
    async with attacked(tmp_path, model_dir, redis_url, honest, killers) as (attack, fleet, tenants):
        await asyncio.gather(*(attack.kill(name, tenants[name], 120.0) for name in killers))
        deaths = sum(each.deaths for each in fleet)
        assert all("tenant_quarantined" in attack.refused[name] for name in killers), attack.refused
        assert deaths <= len(killers) * 4 * LIMITS[TENANT]
        seen = len(attack.honest)
        await becomes(lambda: len(attack.honest) > seen + 30)
        assert {code for code, _ in attack.honest[-20:]} == {None}
        assert not {code for code, _ in attack.honest} & {"tenant_quarantined", "request_quarantined"}
        for name in honest:
            for each in tenants[name]:
                assert (await each.complete(prompt="another", max_tokens=2)).status == 200
