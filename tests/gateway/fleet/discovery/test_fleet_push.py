"""Engines push their state; engines that cannot push are polled."""

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import ClientSession

from gateway.fleet.discovery.health_checks import HealthChecks
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import Address, EngineRecord
from gateway.fleet.engines.health import Health
from testing.gateway.bases import only
from testing.gateway.kinds import kinds_of
from testing.gateway.running import BASE_MODEL, until
from testing.gateway.upstream import TOKEN, Upstream

pytestmark = pytest.mark.usefixtures("quick_polls")


class Fleet:
    """A registry that watches engines, with an event for its changes."""

    def __init__(self, session: ClientSession, *urls: str) -> None:
        self.urls = list(urls)
        self.registry = Registry(self._listed, HealthChecks(session, kinds_of(session), only(BASE_MODEL)))
        self._changed = asyncio.Event()

    async def _listed(self) -> list[Address]:
        return [Address(url) for url in self.urls]

    async def __aenter__(self) -> "Fleet":
        self._task = asyncio.create_task(self.registry.watch(self._changed.set))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    @property
    def engine(self) -> EngineRecord:
        return self.registry.engines[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition, checked only when the registry reports a change."""
        async with asyncio.timeout(30.0):
            while not condition():
                await self._changed.wait()
                self._changed.clear()


@pytest.fixture
async def session():
    async with ClientSession() as session:
        yield session


async def test_residency_and_load_are_heard_as_they_change(session: ClientSession, upstream: Upstream):
    async with Fleet(session, upstream.url) as fleet:
        await fleet.until(lambda: bool(fleet.registry.up))
        await until(lambda: followed_by(upstream, 1))
        upstream.resident = ["sha256:" + "d" * 64]
        await fleet.until(lambda: fleet.engine.resident == {"d" * 64})
        upstream.running = 5
        await fleet.until(lambda: fleet.engine.other_processes_load == 5)
        with fleet.engine.requests.count(None):
            upstream.running = 6
            # Our own request is among the six.
            await fleet.until(lambda: fleet.engine.state.running == 6)
            assert (fleet.engine.other_processes_load, fleet.engine.load) == (5, 6)
        upstream.resident, upstream.running = [], 0
        await fleet.until(lambda: not fleet.engine.resident and not fleet.engine.load)


async def test_an_engine_that_says_it_is_leaving_gets_nothing_more(session: ClientSession, upstream: Upstream):
    async with Fleet(session, upstream.url) as fleet:
        await until(lambda: followed_by(upstream, 1))
        upstream.draining = True
        await fleet.until(lambda: not fleet.engine.available)
        assert fleet.engine.condition.health is Health.DRAINING
        assert upstream.followers == 1


@pytest.mark.usefixtures("starts_servers")
async def test_what_became_of_an_engine_that_falls_silent_is_asked(session: ClientSession):
    async with Upstream().serving() as engine:
        port = int(engine.url.rsplit(":", 1)[1])
        fleet = await Fleet(session, engine.url).__aenter__()
        await until(lambda: followed_by(engine, 1))
    try:
        await fleet.until(lambda: not fleet.registry.up)
        async with Upstream().serving(port) as again:
            again.resident = ["e" * 64]
            await fleet.until(lambda: bool(fleet.registry.up) and fleet.engine.resident == {"e" * 64})
            await until(lambda: followed_by(again, 1))
    finally:
        await fleet.__aexit__()


async def test_an_engine_that_pushes_nothing_is_asked_again_and_again(session: ClientSession, upstream: Upstream):
    upstream.pushes = False
    async with Fleet(session, upstream.url) as fleet:
        await fleet.until(lambda: bool(fleet.registry.up))
        upstream.resident = ["d" * 64]
        await fleet.until(lambda: fleet.engine.resident == {"d" * 64})
        assert upstream.followers == 0


async def test_an_engine_of_another_model_is_not_followed_into_service(session: ClientSession, upstream: Upstream):
    async with Fleet(session, upstream.url) as fleet:
        await until(lambda: followed_by(upstream, 1))
        upstream.model = "other"
        await fleet.until(lambda: fleet.engine.condition.health is Health.MISCONFIGURED)
        assert not fleet.engine.available
        upstream.model = BASE_MODEL
        await fleet.until(lambda: fleet.engine.available)


async def test_an_engine_with_another_internal_token_gets_nothing(session: ClientSession, upstream: Upstream):
    upstream.token = "another token"
    async with Fleet(session, upstream.url) as fleet:
        await fleet.until(lambda: "misconfigured" in fleet.registry.faults.get(upstream.url, ""))
        assert "internal token" in fleet.registry.faults[upstream.url]
        assert not fleet.engine.available
        upstream.token = TOKEN
        await fleet.until(lambda: fleet.engine.available)


async def test_who_is_listed_no_more_is_not_listened_to(session: ClientSession, upstream: Upstream):
    async with Fleet(session, upstream.url) as fleet:
        await until(lambda: followed_by(upstream, 1))
        fleet.urls.clear()
        await until(lambda: followed_by(upstream, 0))
        assert fleet.registry.engines == ()
        fleet.urls.append(upstream.url)
        await until(lambda: followed_by(upstream, 1))


async def followed_by(engine: Upstream, number: int) -> bool:
    return engine.followers == number
