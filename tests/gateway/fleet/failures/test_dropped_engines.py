"""Engines that DNS no longer lists: they may still die of requests that were sent to them before."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import pytest
from redis.asyncio import Redis

from gateway.fleet.discovery import registry
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines import own_requests
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.health import Health
from gateway.fleet.failures.shared_deaths import Report, SharedDeaths
from gateway.process.background import running as in_background
from gateway.settings import Settings
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream

pytestmark = pytest.mark.usefixtures("quick_polls")

NAME = "engines.test"


class Fleet:
    """Engines at one name and port. listed: those whose addresses the name has."""

    def __init__(self, engines: dict[str, Upstream], ends: dict[str, AsyncExitStack]) -> None:
        self.engines, self._ends = engines, ends
        self.port = urlsplit(next(iter(engines.values())).url).port
        self.listed = [*engines]

    def settings(self, tmp_path: Path, model_dir: Path, redis_url: str) -> Settings:
        return settings(tmp_path, model_dir, [f"dns://{NAME}:{self.port}"], redis_url, redis_timeout=30.0)

    async def list_only(self, listed: list[str], *gateways: Gateway) -> None:
        """Change the name's addresses, and wait until the gateways know that and the listed engines are up."""
        self.listed = listed
        urls = {self.engines[host].url for host in listed}

        async def are_known() -> bool:
            found = [(await each.admin.get("/admin/api/engines")).json["data"] for each in gateways]
            return all({each["url"] for each in shown} == urls for shown in found)

        await until(are_known)
        for each in gateways:
            await each.engines_up(len(listed))

    async def end(self, host: str) -> None:
        """Let an engine die."""
        await self._ends[host].aclose()


@pytest.fixture
async def fleet(starts_servers: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    engines, ends, port = dict[str, Upstream](), dict[str, AsyncExitStack](), 0
    async with AsyncExitStack() as stack:
        for number in range(1, 4):
            host = f"127.0.0.{number}"
            ends[host] = await stack.enter_async_context(AsyncExitStack())
            engines[host] = await ends[host].enter_async_context(Upstream().serving(port, host))
            port = urlsplit(engines[host].url).port or 0
        fleet, resolve = Fleet(engines, ends), socket.getaddrinfo

        def look_up(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if host != NAME:
                return resolve(host, port, *args, **kwargs)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in fleet.listed]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        # No state that an engine reports shows that it has survived a request.
        monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 600.0)
        yield fleet


async def leave(gateway: Gateway, key: str | None, engines: list[Upstream], **body: Any) -> Upstream:
    """Send a request whose client leaves before any answer. Return the engine that had it."""
    before = {each: (len(each.requests), each.cancelled) for each in engines}
    for each in engines:
        each.holds = True
    asked = asyncio.create_task(gateway.client(key or "").complete(**body))
    await until(lambda: asyncio.sleep(0, any(len(each.requests) > before[each][0] for each in engines)))
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: asyncio.sleep(0, any(each.cancelled > before[each][1] for each in engines)))
    for each in engines:
        each.holds = False
    return next(each for each in engines if len(each.requests) > before[each][0])


async def test_a_request_that_was_left_on_engines_that_died_unlisted_is_quarantined(
    fleet: Fleet, tmp_path: Path, model_dir: Path, redis_url: str
):
    """They were dropped before their deaths were seen, so a tenant that left such requests was never refused."""
    async with running(fleet.settings(tmp_path, model_dir, redis_url)) as gateway:
        acme = await gateway.tenant("acme")
        for _ in range(2):
            engines = [fleet.engines[host] for host in fleet.listed]
            had_it = await leave(gateway, acme.key, engines, prompt="a secret of acme")
            [host] = [host for host in fleet.listed if fleet.engines[host] is had_it]
            await fleet.list_only([each for each in fleet.listed if each != host], gateway)
            assert (await acme.complete(prompt="a secret of acme", max_tokens=1)).status == 200
            await fleet.end(host)

        async def is_refused() -> bool:
            return (await acme.complete(prompt="a secret of acme")).status == 422

        await until(is_refused, 10.0)
        assert (await acme.complete(prompt="another")).status == 200


async def test_a_tenant_with_requests_on_unlisted_engines_is_reported_at_their_deaths(
    fleet: Fleet, tmp_path: Path, model_dir: Path, redis_url: str
):
    """A gateway that had dropped an engine answered that it had no request there, so its neighbour was blamed."""
    of = fleet.settings(tmp_path, model_dir, redis_url)
    async with running(of) as gateway, running(of) as other:
        acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
        hosts = [*fleet.engines]
        how = {"max_tokens": 4, "stream": True, "x_engine": {"tokens": 4, "pause": True}}
        for dies, stays in pairwise(hosts):
            await fleet.list_only([dies], gateway, other)
            await leave(other, globex.key, [fleet.engines[dies]])
            asked = asyncio.create_task(acme.complete(**how))
            await until(lambda dies=dies: asyncio.sleep(0, bool(fleet.engines[dies].streaming)))
            await fleet.list_only([stays], gateway, other)
            fleet.engines[dies].cut_off()
            assert (await asked).events[-1]["error"]["code"] == "engine_died"
            await until(lambda dies=dies: names_both(redis_url, of, fleet.engines[dies].url))
        fleet.engines[hosts[-1]].paused = False
        assert (await acme.complete(**how)).status == 200


async def names_both(redis_url: str, of: Settings, engine: str) -> bool:
    """Return whether the reports of an engine's death name two tenants."""
    async with Redis.from_url(redis_url) as redis:
        entries = await redis.xrange(SharedDeaths(redis, of.database_url)._key)
    encoded = [value for _, fields in entries for key, value in fields.items() if key != b"processes"]
    reports = [msgspec.json.decode(each, type=Report) for each in encoded]
    return len({tenant for each in reports if each.engine == engine for tenant in each.tenants}) == 2


class World:
    """A registry with the engines at `listed`. The first one is as `health` says, and reports a state if `is_read`."""

    def __init__(self) -> None:
        self.listed = [Address("http://one:1")]
        self.health, self.is_read, self.checks = Health.UP, True, 0
        self.ended = list[str | None]()
        self.registry = Registry(self._discover, cast(Any, self))
        self.registry.on_end = lambda engine: self.ended.append(engine.state.instance)

    async def _discover(self) -> list[Address]:
        return self.listed

    async def check(self, engine: EngineRecord) -> None:
        self.checks += 1
        if engine.url == "http://two:1":
            engine.mark_up()
            return
        if self.is_read:
            engine.observe_state(engine.state, engine.requests.sequences)
        if self.health is Health.UP:
            engine.mark_up()
        elif self.health is Health.MISCONFIGURED:
            engine.mark_misconfigured("of the test")
        else:
            engine.mark_down("of the test", self.health)

    async def follow(self, *_: Any) -> bool:
        return False

    async def start(self) -> EngineRecord:
        await self.registry.poll()
        engine = self.registry.engines[0]
        engine.observe_state(EngineState(instance="i"), 0)
        self.ended.clear()
        return engine


@pytest.mark.parametrize(("before", "ended"), [(Health.UP, ["i"]), (Health.DRAINING, [])])
async def test_the_end_of_an_unlisted_engine_is_a_death_unless_it_drained(before: Health, ended: list[str]):
    world = World()
    engine = await world.start()
    with engine.requests.count(None, "a"):
        world.listed, world.health = [], before
        await world.registry.poll()
        assert (world.registry.engines, engine.available, world.ended) == ((), False, [])
        world.health = Health.DOWN
        for _ in range(3):
            await world.registry.poll()
            assert world.registry.report_detached(engine.url, "i")[0] == {"a"}
            assert world.registry.report_detached(engine.url, "j")[0] == set()
        assert world.ended == ended, "an engine dies once"
    await world.registry.poll()
    assert world.registry.with_dropped == ()


@pytest.mark.parametrize(
    ("address", "is_same"), [(Address("http://one:1"), True), (Address("http://one:1", adapters=3), False)]
)
async def test_an_engine_that_is_listed_again_keeps_its_record(address: Address, is_same: bool):
    world = World()
    engine = await world.start()
    with engine.requests.count(None, "a"):
        for world.listed in ([], [address]):
            await world.registry.poll()
        [again] = world.registry.engines
        assert (again is engine) == is_same
        assert again.available
        assert world.registry.report_detached(engine.url, "i")[0] == {"a"}


async def test_an_engine_without_requests_is_forgotten_at_once():
    world = World()
    engine = await world.start()
    world.listed = []
    await world.registry.poll()
    assert world.registry.with_dropped == ()
    assert engine.condition.health is Health.DRAINING


async def be_unanswered(engine: EngineRecord) -> None:
    """Wait like a request that the engine has not begun to answer. Raises TimeoutError if the wait is ended."""
    async with asyncio.timeout(None) as wait:
        engine.requests.unanswered.add(wait)
        await asyncio.sleep(30.0)


@pytest.mark.parametrize("health", [Health.SILENT, Health.MISCONFIGURED])
async def test_a_dropped_engine_that_is_not_up_has_not_ended(health: Health):
    """A starved engine counted as dead at once, and the requests left on a misconfigured one were forgotten."""
    world = World()
    engine = await world.start()
    with engine.requests.count(None, "a"):
        with engine.requests.count(None, "b"):
            pass
        world.listed, world.health, world.is_read = [], health, False
        for _ in range(3):
            await world.registry.poll()
            assert world.registry.report_detached(engine.url, "i")[0] == {"a", "b"}
        assert world.ended == []
        world.health = Health.DOWN
        await world.registry.poll()
        await world.registry.poll()
        assert world.ended == ["i"]


async def test_a_dropped_engine_that_was_only_silent_ends_without_a_death():
    world = World()
    engine = await world.start()
    with engine.requests.count(None, "a") as request:
        for world.health in (Health.SILENT, Health.UP):
            world.listed = []
            await world.registry.poll()
        request.end()
    await world.registry.poll()
    assert (world.ended, world.registry.with_dropped) == ([], ())


async def test_a_dropped_engine_that_reports_no_state_has_ended_after_a_time(monkeypatch: pytest.MonkeyPatch):
    """Another server may have its address: its answers to health checks show nothing of the engine."""
    monkeypatch.setattr(registry, "UNREAD_SECONDS", 0.5)
    # At once, because each lasts some seconds.
    async with asyncio.TaskGroup() as group:
        for health in (Health.UP, Health.SILENT, Health.MISCONFIGURED):
            group.create_task(check_that_it_ends_without_a_report(health))


async def check_that_it_ends_without_a_report(health: Health) -> None:
    world = World()
    engine = await world.start()
    with engine.requests.count(None, "a"):
        world.listed, world.health = [], health
        polls_until = time.monotonic() + 2.0
        while time.monotonic() < polls_until:
            await world.registry.poll()
            await asyncio.sleep(0.01)
        assert world.ended == [], "it reports its state"
        world.is_read = False

        async def has_ended() -> bool:
            await world.registry.poll()
            return world.ended == ["i"]

        waiting = asyncio.create_task(be_unanswered(engine))
        await until(has_ended)
        with pytest.raises(TimeoutError):
            await waiting
        before = world.checks
        await world.registry.poll()
        assert (world.checks, world.ended) == (before, ["i"]), "its address gets no further checks"


async def test_unanswered_requests_leave_a_dropped_engine_that_is_silent():
    """They waited for the engine's time-out if another engine came later."""
    world = World()
    engine = await world.start()
    async with in_background(world.registry.watch(lambda: None)):
        with engine.requests.count(None, "a"):
            waiting = asyncio.create_task(be_unanswered(engine))
            world.listed, world.health = [], Health.SILENT
            await until(lambda: asyncio.sleep(0, not engine.is_listed and engine.condition.health is Health.SILENT))
            world.listed = [Address("http://two:1")]
            with pytest.raises(TimeoutError):
                await waiting
    assert world.ended == []
