"""Drained engines: an operator's choice, kept in Redis so that all gateways obey it and a restart does not end it.

A drained engine gets no new requests from any gateway within POLL_SECONDS; its running requests continue.
While Redis is away, the last known drains apply.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.errors import Unavailable
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import Drained
from gateway.process.loop_lag import deadline
from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import DRAINED_ENGINES_KEY

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Drains:
    """Drains of a registry's engines. changed: called after each change, because waiting requests may now have room."""

    def __init__(self, redis: Any, timeout: float, registry: Registry, changed: Callable[[], None]) -> None:
        self._redis = redis
        self._timeout = timeout
        self._registry = registry
        self._changed = changed
        self._outage = Outage(log, "reading the drained engines")

    async def drain(self, url: str, actor: str) -> Drained:
        """Drain an engine; a repetition keeps the first time. actor: id of the operator's key. Raises Unavailable."""
        drained = Drained(by=actor, at=datetime.now(UTC))
        await self._write(self._redis.hsetnx(DRAINED_ENGINES_KEY, url, msgspec.json.encode(drained)))
        return self._registry.drained.get(url, drained)

    async def resume(self, url: str) -> bool:
        """End an engine's drain. Returns whether it was drained. Raises Unavailable."""
        return bool(await self._write(self._redis.hdel(DRAINED_ENGINES_KEY, url)))

    async def read(self) -> bool:
        """Apply the present drains. Returns False while Redis is away."""
        try:
            async with deadline(self._timeout):
                found = await self._redis.hgetall(DRAINED_ENGINES_KEY)
        except REDIS_ERRORS as error:
            self._outage.failed(type(error).__name__, "the last known drains apply")
            return False
        self._outage.over()
        drained = _decoded(found)
        if drained != self._registry.drained:
            self._registry.drained = drained
            self._changed()
        return True

    async def watch(self) -> None:
        """Apply other gateways' changes until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.read()

    async def _write(self, call: Any) -> Any:
        try:
            async with deadline(self._timeout):
                result = await call
        except REDIS_ERRORS as error:
            raise Unavailable(
                "Redis is unavailable, so the engine's drain cannot be changed; try again shortly."
            ) from error
        await self.read()
        return result


def _decoded(entries: Mapping[Any, Any]) -> dict[str, Drained]:
    """Return the drains by URL. An entry that this release cannot read drains its engine too."""
    drained = {}
    for key, value in entries.items():
        url = key.decode() if isinstance(key, bytes) else key
        try:
            drained[url] = msgspec.json.decode(value, type=Drained)
        except msgspec.MsgspecError:
            drained[url] = Drained(by="unknown", at=datetime.fromtimestamp(0, UTC))
    return drained
