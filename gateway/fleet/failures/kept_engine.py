"""The engine that is kept for a suspected request: a key in Redis, so that all gateway processes keep the same one.

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
# KEYS: the key. ARGV: the value that it must have; its new lifetime in milliseconds, or 0 to delete it.
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
        self._known_at = -math.inf
        self._redis = redis
        self._change = redis.register_script(CHANGE)
        self._key = kept_engine_key(deployment)
        self._is_needed = is_needed
        self._outage = Outage(log, "keeping an engine for a suspected request")

    @asynccontextmanager
    async def keep(self, url: str) -> AsyncIterator[bool]:
        """Keep an engine until the block ends, at most TURN_SECONDS. Yield False if another one is kept.

        Without Redis no engine is kept.
        """
        value = f"{os.urandom(8).hex()} {url}"
        taking = self._redis.set(self._key, value, nx=True, px=int(1000 * LEASE_SECONDS))
        if await self._answer(taking) in (None, FAILED):
            yield False
            return
        self._note(url)
        renewing = asyncio.create_task(self._renew(url, value))
        try:
            yield True
        finally:
            renewing.cancel()
            await self._give_back(url, value)

    async def _renew(self, url: str, value: str) -> None:
        for _ in range(int(TURN_SECONDS / RENEW_SECONDS)):
            await asyncio.sleep(RENEW_SECONDS)
            await self._answer(self._change(keys=[self._key], args=[value, int(1000 * LEASE_SECONDS)]))
        await self._give_back(url, value)

    async def _give_back(self, url: str, value: str) -> None:
        if self.url == url:
            self.url = None
        await self._answer(self._change(keys=[self._key], args=[value, 0]))

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
            self._note(value.decode().partition(" ")[2] if value else None)
        elif time.monotonic() > self._known_at + LEASE_SECONDS:
            self.url = None

    def _note(self, url: str | None) -> None:
        self.url, self._known_at = url, time.monotonic()

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
