"""Reports of engines that died with requests, shared by all gateway processes of a deployment: a stream in Redis.

A report names engines, tenants by id, and suspects by HMAC or digest; never a prompt.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS

log = logging.getLogger(__name__)

# Time-out of a call; after it the process uses its own reports only.
CALL_SECONDS = 1.0
# Longest time that Redis holds a call that waits for a report. An outage without an error is noticed after both times.
WAIT_SECONDS = 1.0
# Most reports that the stream keeps, and most that one call reads.
MAX_REPORTS = 1000
PAGE = 100
# KEYS: the stream. ARGV: seconds to keep it, its longest length, the reporting process, the report.
ADD = """
redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[2], '*', ARGV[3], ARGV[4])
return redis.call('EXPIRE', KEYS[1], ARGV[1])
"""
# KEYS: the stream. ARGV: the id of the last entry that is known, the most entries to return. Returns the server's
# clock in milliseconds, which is the clock of the ids, and the entries after that id.
READ = """
local time = redis.call('TIME')
local found = redis.call('XREAD', 'COUNT', ARGV[2], 'STREAMS', KEYS[1], ARGV[1])
return {tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000), found and found[1][2] or {}}
"""


class Suspect(NamedTuple):
    """A tenant's request by its HMAC, or a tenant's adapter by its digest. kind: "request", "adapter" or "probe"."""

    kind: str
    tenant_id: str
    mark: str


class Report(msgspec.Struct):
    """An engine's death as a process saw it: the tenants of its requests there, and the requests that broke."""

    engine: str
    tenants: list[str]
    suspects: list[Suspect]


class SharedDeaths:
    """Stream of reports. deployment: a value that only this deployment's processes share, such as the database URL."""

    def __init__(self, redis: Any, deployment: str) -> None:
        self._redis = redis
        self._add, self._read = redis.register_script(ADD), redis.register_script(READ)
        self._key = f"loraplex:deaths:{hashlib.sha256(deployment.encode()).hexdigest()[:16]}"
        self._process = os.urandom(8).hex()
        self._last = b"0"
        self._outage = Outage(log, "sharing the deaths of engines")
        self._reading = asyncio.Lock()
        self.is_away = False

    async def add(self, report: Report, seconds: float) -> None:
        """Share a report. The stream is deleted `seconds` after its last report.

        While Redis is away the report is not shared, and only this process applies it.
        """
        arguments = [int(seconds) + 1, MAX_REPORTS, self._process, msgspec.json.encode(report)]
        await self._call(self._add, arguments)

    async def read(self) -> list[tuple[Report, float]]:
        """Return the new reports of other processes, and the age of each in seconds."""
        async with self._reading:
            now, entries = await self._call(self._read, [self._last, PAGE]) or (0, [])
            if entries:
                self._last = entries[-1][0]
        return [
            (report, max(0.0, now - int(entry_id.split(b"-")[0])) / 1000)
            # A later release may add fields to an entry.
            for entry_id, (process, encoded, *_) in entries
            if process != self._process.encode() and (report := _decode(encoded)) is not None
        ]

    async def wait(self) -> bool:
        """Wait for a report that is not read yet, for at most WAIT_SECONDS. Return whether there is one.

        The call occupies one of the client's connections.
        """
        return bool(await self._answer(self._wait(), WAIT_SECONDS + CALL_SECONDS))

    async def _wait(self) -> Any:
        try:
            return await self._redis.xread({self._key: self._last}, count=1, block=int(1000 * WAIT_SECONDS))
        except ResponseError:
            # A proxy or an ACL may refuse calls that wait. The reports are then read without waiting.
            return True

    async def _call(self, script: Any, arguments: list[Any]) -> Any:
        return await self._answer(script(keys=[self._key], args=arguments), CALL_SECONDS)

    async def _answer(self, call: Awaitable[Any], seconds: float) -> Any:
        """Return the answer of Redis, None if there is none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                result = await call
        except REDIS_ERRORS as error:
            self.is_away = True
            self._outage.failed(type(error).__name__, "each process knows only the deaths that it saw")
            return None
        self.is_away = False
        self._outage.over()
        return result


def _decode(encoded: bytes) -> Report | None:
    try:
        return msgspec.json.decode(encoded, type=Report)
    except msgspec.DecodeError as error:
        log.warning("dropped a report of an engine's death that cannot be decoded: %s", error)
        return None
