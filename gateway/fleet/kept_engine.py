"""The engine that is kept for a suspected request: a key in Redis, so that all gateway processes keep the same one.

The process with the request sets the key and renews it. The others read it several times a second while any request is
suspected; they know that from the shared reports of deaths.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS

log = logging.getLogger(__name__)

CALL_SECONDS = 1.0
READ_SECONDS = 0.2
# The engine is kept this long after the last renewal, so that a process that dies keeps it no longer.
LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.0
# Longest time for which the engine is kept. Then it serves all requests again.
TURN_SECONDS = 120.0
# KEYS: the key. ARGV: its value, the milliseconds to keep it for; 0: delete it.
CHANGE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
if ARGV[2] == '0' then
    return redis.call('DEL', KEYS[1])
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""


class KeptEngine:
    """The kept engine of a deployment. url: the engine's address; None if none is kept, as far as this process knows.

    deployment: a value that only this deployment's processes share. is_needed: returns whether any request may be
    suspected.
    """

    def __init__(self, redis: Any, deployment: str, is_needed: Callable[[], bool]) -> None:
        self.url: str | None = None
        self._redis = redis
        self._change = redis.register_script(CHANGE)
        self._key = f"loraplex:kept:{hashlib.sha256(deployment.encode()).hexdigest()[:16]}"
        self._is_needed = is_needed
        self._outage = Outage(log, "keeping an engine for a suspected request")

    @asynccontextmanager
    async def keep(self, url: str) -> AsyncIterator[bool]:
        """Keep an engine until the block ends, at most TURN_SECONDS. Yield False if another one is kept.

        Without Redis no engine is kept.
        """
        value = f"{os.urandom(8).hex()} {url}"
        taken = self._redis.set(self._key, value, nx=True, px=int(1000 * LEASE_SECONDS))
        if not await self._answer(taken):
            yield False
            return
        self.url = url
        renewing = asyncio.create_task(self._renew(value))
        try:
            yield True
        finally:
            renewing.cancel()
            self.url = None
            await self._answer(self._change(keys=[self._key], args=[value, 0]))

    async def _renew(self, value: str) -> None:
        for _ in range(int(TURN_SECONDS / RENEW_SECONDS)):
            await asyncio.sleep(RENEW_SECONDS)
            await self._answer(self._change(keys=[self._key], args=[value, int(1000 * LEASE_SECONDS)]))
        self.url = None
        await self._answer(self._change(keys=[self._key], args=[value, 0]))

    async def watch(self) -> None:
        """Read which engine is kept, until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            if self._is_needed():
                await self.read()

    async def read(self) -> None:
        """Read which engine is kept."""
        value = await self._answer(self._redis.get(self._key))
        self.url = value.decode().partition(" ")[2] if value else None

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """Return the answer of Redis, None if there is none in time."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                result = await call
        except REDIS_ERRORS as error:
            self._outage.failed(type(error).__name__, "suspected requests wait")
            return None
        self._outage.over()
        return result
