"""Frame over a status in memory, and an application of one page with a visitor of the test's choice."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.api.health import State
from gateway.fleet.engines.engine import Address, EngineRecord
from gateway.pages.frame.assets import Assets
from gateway.pages.frame.frame import Frame
from gateway.pages.frame.strip import Strip

SINCE = datetime(2026, 11, 1, 4, 53, 47, tzinfo=UTC)


class World:
    """Parts and engines of a gateway, without a gateway. visitor: the visitor of the next requests."""

    def __init__(self, environment: str | None = None) -> None:
        self.states = {name: State("ok", SINCE) for name in ("database", "redis", "quota", "engines", "ledger")}
        self.engines: list[EngineRecord] = []
        self.queues = SimpleNamespace(waiting=0, longest_wait=0.0)
        self.visitor: Any = self.person("operator")
        self.assets = Assets()
        self.strip = Strip(lambda: self.states, self, self.queues)
        self.frame = Frame(self.strip, self.assets, lambda _: self.visitor, "EUR", environment)

    def person(self, role: str, label: str = "Ada") -> SimpleNamespace:
        expires_at = datetime.now(UTC) + timedelta(hours=1)
        return SimpleNamespace(
            session_id="s1",
            label=label,
            role=role,
            scopes=frozenset(),
            csrf="t0k3n",
            tenant=None,
            subject="key_1",
            expires_at=expires_at,
        )

    def engine(self, url: str) -> EngineRecord:
        engine = EngineRecord(Address(url))
        engine.mark_up()
        self.engines.append(engine)
        return engine


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Return a world; a test can name its environment by an indirect parameter."""
    return World(getattr(request, "param", None))


class Site:
    """Application with the page `/admin/`, whose template and variables the test chooses."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.template, self.context = "error.html", {"message": "Hello", "hint": None, "code": 200, "request_id": None}
        self.app = web.Application()
        self.app.router.add_get("/admin/", self.page)
        self.app.router.add_get("/admin/engines", self.page)
        self.app.router.add_get("/console/", self.page)
        self.app.router.add_get("/static/{version}/{name:.+}", world.assets.get)

    async def page(self, request: web.Request) -> web.Response:
        return self.world.frame.render(request, self.template, title="Test", **self.context)


class Reader:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def get(self, path: str, **options: Any) -> tuple[aiohttp.ClientResponse, str]:
        async with self.session.get(self.url + path, **options) as response:
            return response, (await response.read()).decode(errors="replace")


@pytest.fixture
def site(world: World) -> Site:
    return Site(world)


@pytest.fixture
async def reader(starts_servers: None, site: Site) -> AsyncIterator[Reader]:
    server = TestServer(site.app)
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        yield Reader(session, str(server.make_url("")).rstrip("/"))
    await server.close()
