"""Reports of engines that died with requests, shared by all gateway processes of a deployment: a stream in Redis.

A report names engines, tenants by id, and suspects by HMAC or digest; never a prompt. A sorted set has the processes,
so that each knows which ones have not yet reported their tenants.
"""

import asyncio
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from gateway.fleet.engines.suspects import OrphanedRequests, Suspect
from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import deaths_key, deaths_processes_key

log = logging.getLogger(__name__)

# Time-out of a call; after it the process uses its own reports only.
CALL_SECONDS = 1.0
# Longest time that Redis holds a call that waits for a report. An outage without an error is noticed after both times.
WAIT_SECONDS = 1.0
# Most reports that the stream keeps, and most that one call reads.
MAX_REPORTS = 1000
PAGE = 100
# Maximum tenants and names of requests (120 bytes each) in one entry of a process's last report. A longer report is
# divided, because an entry of megabytes might not reach Redis in time, and all tenants' requests would be lost.
MAX_NAMES = 1000
# Longest time for all entries of a process's last report. Without the last entry, the others wait ALIVE_SECONDS.
LEAVE_SECONDS = 5.0
# A process counts as ended after this time without a call. It is long, because a suspended process may still have
# requests on engines.
ALIVE_SECONDS = 60
# Longest pause between two calls that show that the process is alive, and read which others are.
DUE_SECONDS = 5.0
# Stands for the engine in a process's last report: the process has ended, and engines may still have the requests
# `left`.
NO_ENGINE = ""
# Stands for the engine in a report by which an operator ends the quarantine of `tenants`. To the previous release it is
# the death of an engine without suspects.
ENDED_BY_OPERATOR = "ended by operator"
# KEYS: the stream, the processes. ARGV: the calling process, ALIVE_SECONDS. `now`: the server's clock in milliseconds,
# which is the clock of the stream's ids.
_ALIVE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 1000 * ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
"""
# Further ARGV: seconds to keep the stream, its longest length, the report. Returns the processes, and the entry's id.
# The entry has the processes too: the caller may not know one that has just started, and all must expect the same ones.
ADD = (
    _ALIVE
    + """
local alive = redis.call('ZRANGE', KEYS[2], 0, -1)
local entry = {ARGV[1], ARGV[5], 'processes', table.concat(alive, ' ')}
local id = redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[4], '*', unpack(entry))
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {alive, id}
"""
)
# Further ARGV: the id of the last entry that is known, the most entries to return. Returns the processes, `now`, and
# the entries after that id.
READ = (
    _ALIVE
    + """
local found = redis.call('XREAD', 'COUNT', ARGV[4], 'STREAMS', KEYS[1], ARGV[3])
return {redis.call('ZRANGE', KEYS[2], 0, -1), now, found and found[1][2] or {}}
"""
)


class Report(msgspec.Struct):
    """A process's report of an engine's death, of its own end (NO_ENGINE), or of quarantines' end (ENDED_BY_OPERATOR).

    tenants: those of the process's requests there, or whose quarantine ended. suspects: the requests that broke.
    instance: the engine's, None if unknown. processes: those that must answer; none if no answer is expected. age:
    seconds since the death. left: in the last report of a process. continues: whether the report continues in the next
    entry.
    """

    engine: str
    tenants: list[str]
    suspects: list[Suspect]
    instance: str | None = None
    processes: list[str] = []
    age: float = 0.0
    left: list[OrphanedRequests] = []
    continues: bool = False


class Entry(NamedTuple):
    """A report in the stream. id: grows with each entry. age: seconds since the report."""

    id: tuple[int, ...]
    process: str
    report: Report
    age: float


class SharedDeaths:
    """Stream of reports. deployment: a value that only this deployment's processes share, such as the database URL.

    process: this process's name. processes: the names of all that were alive at the last call.
    """

    def __init__(self, redis: Any, deployment: str) -> None:
        self._redis = redis
        self._add, self._read = redis.register_script(ADD), redis.register_script(READ)
        self._key = deaths_key(deployment)
        self._alive = deaths_processes_key(deployment)
        self.process = os.urandom(8).hex()
        self.processes = {self.process}
        self._last = b"0"
        self._outage = Outage(log, "sharing the deaths of engines")
        self._reading = asyncio.Lock()
        self.is_away = False
        self._called_at = -math.inf

    @property
    def is_due(self) -> bool:
        """Return whether this process must show again that it is alive."""
        return time.monotonic() > self._called_at + DUE_SECONDS

    async def add(self, report: Report, seconds: float) -> tuple[int, ...] | None:
        """Share a report, and return its entry's id. The stream is deleted `seconds` after its last report.

        While Redis is away the report is not shared, only this process applies it, and None is returned.
        """
        found = await self._call(self._add, [int(seconds) + 1, MAX_REPORTS, msgspec.json.encode(report)])
        if found is None:
            return None
        self.processes = {each.decode() for each in found[0]}
        return _number(found[1])

    async def read(self) -> list[Entry]:
        """Return the new reports of other processes."""
        async with self._reading:
            found, now, entries = await self._call(self._read, [self._last, PAGE]) or (None, 0, [])
            if entries:
                self._last = entries[-1][0]
        if found is not None:
            self.processes = {each.decode() for each in found}
        new = list[Entry]()
        for entry_id, fields in entries:
            entry = _decode(entry_id, fields, now)
            if entry is not None and entry.process != self.process:
                new.append(entry)
        return new

    async def leave(self, seconds: float, left: Sequence[OrphanedRequests] = ()) -> None:
        """Tell the others that this process has ended, so that no death waits for its report. left: as in Report."""
        parts = _divide(left)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                for number, part in enumerate(parts, 1):
                    report = Report(NO_ENGINE, [], [], left=part, continues=number < len(parts))
                    if await self.add(report, seconds) is None:
                        return
                await self._answer(self._redis.zrem(self._alive, self.process), CALL_SECONDS)
        except TimeoutError:
            log.warning("this process's last report took more than %g s; the others know a part of it", LEAVE_SECONDS)

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
        self._called_at = time.monotonic()
        keys, caller = [self._key, self._alive], [self.process, ALIVE_SECONDS]
        return await self._answer(script(keys=keys, args=caller + arguments), CALL_SECONDS)

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


def _divide(left: Sequence[OrphanedRequests]) -> list[list[OrphanedRequests]]:
    """Divide requests into parts of at most MAX_NAMES tenants and names. Each name's tenant is in its part."""
    parts, room = [list[OrphanedRequests]()], MAX_NAMES
    for each in left:
        names_of = defaultdict[str, list[Suspect]](list)
        for suspect in each.suspects:
            names_of[suspect.tenant_id].append(suspect)
        piece: OrphanedRequests | None = None
        for tenant_id in each.tenants:
            names = names_of[tenant_id]
            while True:
                if room < 2:
                    parts.append([])
                    piece, room = None, MAX_NAMES
                if piece is None:
                    piece = OrphanedRequests(each.engine, each.instance, [], [])
                    parts[-1].append(piece)
                taken, names = names[: room - 1], names[room - 1 :]
                piece.tenants.append(tenant_id)
                piece.suspects += taken
                room -= 1 + len(taken)
                if not names:
                    break
    return parts


def _number(entry_id: bytes) -> tuple[int, ...]:
    return tuple(int(each) for each in entry_id.split(b"-"))


def _decode(entry_id: bytes, fields: Sequence[bytes], now: float) -> Entry | None:
    """Return an entry of the stream, None if it cannot be decoded. now: the server's clock in milliseconds."""
    try:
        process, encoded, *added = fields
        # Redis has added the living processes; the previous release adds nothing.
        alive = dict(zip(added[::2], added[1::2], strict=True)).get(b"processes", b"")
        report = msgspec.json.decode(encoded, type=Report)
        if report.processes:
            report.processes = [*{*report.processes, *alive.decode().split()}]
        number = _number(entry_id)
        return Entry(number, process.decode(), report, max(0.0, now - number[0]) / 1000)
    except (ValueError, RecursionError) as error:
        # Another release, or another writer. The error of a bad encoding is a ValueError, as msgspec's errors are.
        log.warning("dropped a report of an engine's death that cannot be decoded: %s", error)
        return None
