"""The engine that is kept for a suspected request or tenant: a key in Redis, so that all processes keep the same one.

The process with the request sets the key and renews it. The others read it several times a second while a death of an
engine is remembered; all processes share the reports of deaths.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import kept_engine_key

log = logging.getLogger(__name__)

# Stands for an answer that Redis did not give.
FAILED = object()
CALL_SECONDS = 1.0
READ_SECONDS = 0.2
# Lifetime of the lease after its last renewal: if the process dies, the engine serves all again.
LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0
# Longest time for which the engine is kept. Then it serves all requests again.
TURN_SECONDS = 120.0
# KEYS: the key. ARGV: the value that it must have; its new lifetime in milliseconds, or 0 to delete it; its new value.
CHANGE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
if ARGV[2] == '0' then
    return redis.call('DEL', KEYS[1])
end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[2])
return 1
"""


class Lease:
    """A process's right to keep an engine. tenant_id: the tenant for which it is kept; empty for a single request."""

    def __init__(self, url: str, tenant_id: str) -> None:
        self._mark = os.urandom(8).hex()
        self.url, self.tenant_id = url, tenant_id
        self.is_open = False

    @property
    def value(self) -> str:
        """Return the key's value. The previous release reads only the address, after the first space."""
        about = [self._mark, self.tenant_id, "open" if self.is_open else ""] if self.tenant_id else [self._mark]
        return f"{'/'.join(about)} {self.url}"


class KeptEngine:
    """The kept engine of a deployment. url: the engine's address; None if none is kept, as far as this process knows.
    tenant_id: the tenant for which it is kept; empty for a single request. is_open: whether it has become free of other
    tenants' requests, so that all processes send the tenant's there.

    deployment: a value that only this deployment's processes share. is_needed: returns whether any request may be
    suspected.
    """

    def __init__(self, redis: Any, deployment: str, is_needed: Callable[[], bool]) -> None:
        self.url: str | None = None
        self.tenant_id = ""
        self.is_open = False
        self._known_at = -math.inf
        self._redis = redis
        self._change = redis.register_script(CHANGE)
        self._key = kept_engine_key(deployment)
        self._is_needed = is_needed
        self._outage = Outage(log, "keeping an engine for a suspected request")

    @asynccontextmanager
    async def keep(self, url: str, tenant_id: str = "") -> AsyncIterator[Lease | None]:
        """Keep an engine until the block ends, at most TURN_SECONDS. Yield None if another one is kept.

        Without Redis no engine is kept.
        """
        lease = Lease(url, tenant_id)
        taking = self._redis.set(self._key, lease.value, nx=True, px=int(1000 * LEASE_SECONDS))
        if await self._answer(taking) in (None, FAILED):
            yield None
            return
        self._note(lease.value)
        renewing = asyncio.create_task(self._renew(lease))
        try:
            yield lease
        finally:
            renewing.cancel()
            await self._give_back(lease)

    async def open(self, lease: Lease) -> bool:
        """Let all processes send the requests of the lease's tenant to its engine. Return whether it is still kept."""
        before, lease.is_open = lease.value, True
        if await self._change_value(before, int(1000 * LEASE_SECONDS), lease.value) != 1:
            return False
        self._note(lease.value)
        return True

    async def _renew(self, lease: Lease) -> None:
        for _ in range(int(TURN_SECONDS / RENEW_SECONDS)):
            await asyncio.sleep(RENEW_SECONDS)
            await self._change_value(lease.value, int(1000 * LEASE_SECONDS), lease.value)
        await self._give_back(lease)

    async def _give_back(self, lease: Lease) -> None:
        if self.url == lease.url:
            self._note(None)
        await self._change_value(lease.value, 0, "")

    async def _change_value(self, before: str, lifetime: int, value: str) -> Any:
        return await self._answer(self._change(keys=[self._key], args=[before, lifetime, value]))

    async def watch(self) -> None:
        """Read which engine is kept, until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            if self.url is not None or self._is_needed():
                await self.read()

    async def read(self) -> None:
        """Read which engine is kept. Without an answer, the last known one counts for LEASE_SECONDS."""
        value = await self._answer(self._redis.get(self._key))
        if value is not FAILED:
            self._note(value.decode() if value else None)
        elif time.monotonic() > self._known_at + LEASE_SECONDS:
            self._note(None)

    def _note(self, value: str | None) -> None:
        """Note the key's value, None if there is none."""
        about, _, url = (value or "").partition(" ")
        _, self.tenant_id, opened = f"{about}//".split("/")[:3]
        self.url, self.is_open = url or None, bool(opened)
        self._known_at = time.monotonic()

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """Return the answer of Redis, FAILED if there is none in time."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                result = await call
        except REDIS_ERRORS as error:
            self._outage.failed(type(error).__name__, "suspected requests wait")
            return FAILED
        self._outage.over()
        return result
