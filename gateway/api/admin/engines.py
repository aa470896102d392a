"""`/admin/api/engines`: the engines with their health, and their drains."""

import logging
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from gateway.api.requests.fields import json_response, read_body
from gateway.api.scopes import ACTOR
from gateway.errors import RecordNotFound, Unavailable
from gateway.fleet.discovery.drains import Drains
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import Drained, EngineRecord
from gateway.process.background import run_to_end
from gateway.records.audit import Audit

log = logging.getLogger(__name__)


class EngineUrl(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body that names an engine. url: as `GET /admin/api/engines` shows it."""

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class ShownEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine. reason: why it gets no requests; null if it does. state: the engine's last report."""

    object: Literal["engine"] = "engine"
    url: str
    kind: str
    healthy: bool
    available: bool
    health: str
    drained: Drained | None
    reason: str | None
    in_flight: int
    load: float
    limit: float
    resident: list[str]
    host: list[str]
    state: dict[str, Any]


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ShownEngine]


class UnknownEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that was drained and is not known now."""

    object: Literal["engine"] = "engine"
    url: str


class AdminEngines:
    """Operator's routes for engines. While SQL is unavailable, a drain takes effect without an audit entry."""

    def __init__(self, *, registry: Registry, drains: Drains, audit: Audit) -> None:
        self._registry = registry
        self._drains = drains
        self._audit = audit

    async def list(self, _: web.Request) -> web.Response:
        return json_response(EngineList(data=[describe_engine(engine) for engine in self._registry.engines]))

    async def drain(self, request: web.Request) -> web.Response:
        """Stop new requests to an engine; its running requests continue. A repetition changes nothing."""
        url = (await read_body(request, EngineUrl)).url
        return json_response(describe_engine(await self.drain_engine(url, request[ACTOR])))

    async def resume(self, request: web.Request) -> web.Response:
        """Send new requests to a drained engine again."""
        url = (await read_body(request, EngineUrl)).url
        engine = await self.resume_engine(url, request[ACTOR])
        return json_response(UnknownEngine(url=url) if engine is None else describe_engine(engine))

    async def drain_engine(self, url: str, actor: str) -> EngineRecord:
        """Drain an engine and record it. Raises RecordNotFound, Unavailable."""
        engine = find_engine(self._registry, url)
        if engine.drained is None:
            await run_to_end(self._drain(url, actor))
        return engine

    async def resume_engine(self, url: str, actor: str) -> EngineRecord | None:
        """End a drain and record it. Returns None if the drained engine is not in the registry."""
        is_known = any(engine.url == url for engine in self._registry.engines)
        if not await run_to_end(self._resume(url, actor)):
            find_engine(self._registry, url)
        return find_engine(self._registry, url) if is_known else None

    async def _drain(self, url: str, actor: str) -> None:
        await self._drains.drain(url, actor)
        await self._record(actor, "engine.drain", url)

    async def _resume(self, url: str, actor: str) -> bool:
        """Return whether the engine was drained."""
        was_drained = await self._drains.resume(url)
        if was_drained:
            await self._record(actor, "engine.resume", url)
        return was_drained

    async def _record(self, actor: str, action: str, url: str) -> None:
        try:
            await self._audit.add(actor, action, url, {})
        except Unavailable:
            log.warning("%s of %s by %s is not in the audit: the database is unavailable", action, url, actor)


def find_engine(registry: Registry, url: str) -> EngineRecord:
    """Return the engine at a URL. Raises RecordNotFound, which names the known engines."""
    for engine in registry.engines:
        if engine.url == url:
            return engine
    known = ", ".join(engine.url for engine in registry.engines[:20]) or "none"
    raise RecordNotFound(f"There is no engine at {url[:200]}; known are: {known}.", param="url")


def describe_engine(engine: EngineRecord) -> ShownEngine:
    return ShownEngine(
        url=engine.url,
        kind=engine.address.traits.name,
        healthy=engine.is_up,
        available=engine.available,
        health=engine.condition.health,
        drained=engine.drained,
        reason=engine.fault,
        in_flight=engine.requests.in_flight,
        load=engine.load,
        limit=engine.max_in_flight,
        resident=sorted(engine.resident),
        host=sorted(engine.host),
        state=engine.state.reported,
    )
