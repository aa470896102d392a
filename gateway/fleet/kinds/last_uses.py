"""Times of the last use of a foreign server's adapters by any gateway process: a sorted set in Redis for each server.

They decide which adapter is unloaded when a server is full. Without Redis a process knows its own uses only. A member
of the set is a digest and a tenant's id.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import adapter_uses_key

log = logging.getLogger(__name__)

# Period at which an adapter in constant use is reported; the order of two uses within it does not matter.
REPORT_SECONDS = 1.0
# Uses older than this are forgotten.
KEEP_SECONDS = 3600
# KEYS: the set. ARGV: seconds to keep, then of each use: member, seconds since the use. Scores are Redis' own clock.
SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
for i = 2, #ARGV, 2 do redis.call('ZADD', KEYS[1], 'GT', now - tonumber(ARGV[i + 1]), ARGV[i]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[1]))
redis.call('EXPIRE', KEYS[1], ARGV[1])
return redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
"""


class LastUses:
    """Last uses of adapters. redis: None for a process that shares its engines with no other. timeout: seconds of a
    call to Redis.
    """

    def __init__(self, redis: Any, timeout: float) -> None:
        self._script = redis.register_script(SCRIPT) if redis is not None else None
        self._timeout = timeout
        self._outage = Outage(log, "sharing the use of servers' adapters")
        # By engine and member: the last use here, on this host's clock, and the last use reported to Redis.
        self._own: dict[str, dict[str, float]] = {}
        # By engine and digest: the member of the last use here.
        self._last: dict[str, dict[str, str]] = {}
        self._reported: dict[str, dict[str, float]] = {}
        self._reporting: dict[str, asyncio.Task[None]] = {}

    def note(self, engine_url: str, digest: str, tenant_id: str = "") -> None:
        """Record a tenant's use that begins now; Redis is updated in the background."""
        self._note(engine_url, digest, f"{digest}:{tenant_id}")

    def note_again(self, engine_url: str, digest: str) -> None:
        """Record that the last use of an adapter by this process goes on."""
        self._note(engine_url, digest, self._last.get(engine_url, {}).get(digest, f"{digest}:"))

    def _note(self, engine_url: str, digest: str, member: str) -> None:
        now = time.time()
        own, reported = self._own.setdefault(engine_url, {}), self._reported.setdefault(engine_url, {})
        own[member] = now
        self._last.setdefault(engine_url, {})[digest] = member
        if self._script is None or now - reported.get(member, 0.0) < REPORT_SECONDS or engine_url in self._reporting:
            return
        task = self._reporting[engine_url] = asyncio.create_task(self._report(engine_url))
        task.add_done_callback(lambda _: self._reporting.pop(engine_url, None))

    async def all(self, engine_url: str) -> Mapping[str, Mapping[str, float]]:
        """Return the times of the last uses by digest and tenant, by all processes if Redis answers."""
        # Redis has received all uses of this process, and its clock is the same for all processes.
        found: dict[str, dict[str, float]] = {}
        for member, at in (await self._call(engine_url) or self._own.get(engine_url, {})).items():
            digest, _, tenant_id = member.partition(":")
            found.setdefault(digest, {})[tenant_id] = at
        return found

    async def _report(self, engine_url: str) -> None:
        """Report all new uses, because another process evicts adapters without a known use first."""
        own, reported = self._own[engine_url], self._reported[engine_url]
        while await self._call(engine_url):
            if not any(at - reported.get(member, 0.0) >= REPORT_SECONDS for member, at in own.items()):
                return

    async def _call(self, engine_url: str) -> dict[str, float]:
        """Report unreported uses to Redis. Returns all uses, or nothing while Redis is away."""
        now = time.time()
        own, reported = self._own.get(engine_url, {}), self._reported.get(engine_url, {})
        last = self._last.get(engine_url, {})
        for member in [each for each, at in own.items() if now - at > KEEP_SECONDS]:
            own.pop(member)
            reported.pop(member, None)
            digest = member.partition(":")[0]
            if last.get(digest) == member:
                del last[digest]
        # A use is sent as an age, because it may be reported long after it began.
        news = {member: now - at for member, at in own.items() if at > reported.get(member, 0.0)}
        if self._script is None:
            return {}
        try:
            async with asyncio.timeout(self._timeout):
                found = await self._script(
                    keys=[adapter_uses_key(engine_url)],
                    args=[KEEP_SECONDS, *(part for use in news.items() for part in use)],
                )
        except REDIS_ERRORS as error:
            self._outage.failed(type(error).__name__, "each process knows only its own uses")
            return {}
        self._outage.over()
        reported.update(dict.fromkeys(news, now))
        pairs = [item.decode() if isinstance(item, bytes) else item for item in found]
        return {member: float(at) for member, at in zip(pairs[::2], pairs[1::2], strict=True)}
