"""Each tenant's usage events in Redis: added by the quota's script at settlement, removed once SQL has them."""

import logging
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisError

from gateway.billing import sweeps
from gateway.errors import Unavailable
from gateway.process.loop_lag import deadline

log = logging.getLogger(__name__)

# Exists while a process sweeps, so that no other begins.
SWEEPER = "loraplex:usage:sweeper"
# The number of events in all streams, as the last sweep found it, and how long that stands.
BACKLOG = "loraplex:usage:backlog"
BACKLOG_SECONDS = 60
# The one field of an entry.
FIELD = b"event"
# Entries read at once.
PAGE = 500


def stream_key(tenant_id: str) -> str:
    """The hash tag keeps a tenant's keys together, so that the quota's script may add to the stream."""
    return f"loraplex:{{{tenant_id}}}:usage"


def leases_key(tenant_id: str) -> str:
    """Return the key of the quota's leases of a tenant."""
    return f"loraplex:{{{tenant_id}}}:leases"


class UsageStream:
    """Every method raises Unavailable when Redis is away. Deadlines are of pages, whatever the number of tenants."""

    def __init__(self, redis: Redis | RedisCluster, timeout: float) -> None:
        self._redis = redis
        self._timeout = timeout

    async def tenants(self) -> list[str]:
        """Return the tenants that may have leases or events, sorted."""
        return sorted({tenant_id async for page in self._pages() for tenant_id in page})

    async def is_first(self, seconds: float) -> bool:
        """Return whether this process is to sweep: no other has asked, or published, for so many seconds."""
        return bool(await self._call(sweeps.is_first(self._redis, SWEEPER, seconds)))

    async def backlog(self) -> int:
        """Return the number of events in all streams, as it was published last."""
        return int(await self._call(self._redis.get(BACKLOG)) or 0)

    async def publish(self, backlog: int, seconds: float) -> None:
        """Tell all processes the backlog, and keep them from sweeping for so many more seconds."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(BACKLOG, backlog, ex=BACKLOG_SECONDS)
        pipeline.set(SWEEPER, b"", px=max(1, int(seconds * 1000)))
        await self._call(pipeline.execute())

    async def move_tenants(self) -> None:
        """Take over the tenants that the release before has registered."""
        while await self._call(sweeps.move_page(self._redis)):
            pass

    async def lengths(self) -> AsyncIterator[dict[str, int]]:
        """Return the number of waiting events of each tenant with any, as far as its part of Redis answers."""
        seconds, _ = await self._call(self._redis.time())
        idle_before = (seconds - sweeps.IDLE_SECONDS) * 1000
        async for tenants in self._pages():
            yield await self._lengths(tenants, idle_before)

    async def _lengths(self, tenants: dict[str, float], idle_before: float) -> dict[str, int]:
        """Return the lengths of a page's streams. idle_before: the moment (ms) before which a registration is old."""
        old = [tenant_id for tenant_id, registered in tenants.items() if registered < idle_before]
        # Leases before streams: a request that is settled between the two questions has moved to the stream.
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id in old:
            pipeline.zcard(leases_key(tenant_id))
        for tenant_id in tenants:
            pipeline.xlen(stream_key(tenant_id))
        answers = await self._call(pipeline.execute(raise_on_error=False))
        leases = dict(zip(old, answers[: len(old)], strict=True))
        lengths = dict(zip(tenants, answers[len(old) :], strict=True))
        for tenant_id, error in lengths.items():
            if isinstance(error, Exception):
                # The others' events do not wait for it.
                log.error("usage events of tenant %s cannot be counted: %s", tenant_id, error)
        idle = [(id_, tenants[id_]) for id_ in old if leases[id_] == 0 and lengths[id_] == 0]
        if idle:
            await self._call(sweeps.remove(self._redis, idle))
        return {tenant_id: length for tenant_id, length in lengths.items() if isinstance(length, int) and length}

    async def _pages(self) -> AsyncIterator[dict[str, float]]:
        cursor = -1
        while cursor:
            cursor, tenants = await self._call(sweeps.page(self._redis, max(0, cursor)))
            if tenants:
                yield tenants

    async def left_behind(self, tenant_id: str, min_age: float) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Pages of (entry id, event) that have waited for at least `min_age` seconds, by Redis' clock, oldest first."""
        seconds, microseconds = await self._call(self._redis.time())
        newest = int((seconds + microseconds / 1e6 - min_age) * 1000)
        start = "-"
        while True:
            page = await self._call(self._redis.xrange(stream_key(tenant_id), start, f"{newest}", count=PAGE))
            if page:
                yield [(entry_id, fields.get(FIELD, b"")) for entry_id, fields in page]
            if len(page) < PAGE:
                return
            start = b"(" + page[-1][0]

    async def remove(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Entries, as (tenant id, entry id), that SQL has."""
        by_tenant: dict[str, list[bytes]] = {}
        for tenant_id, entry_id in entries:
            by_tenant.setdefault(tenant_id, []).append(entry_id)
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id, ids in by_tenant.items():
            pipeline.xdel(stream_key(tenant_id), *ids)
        await self._call(pipeline.execute())

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            async with deadline(self._timeout):
                return await call
        except (RedisError, OSError, TimeoutError, AttributeError) as error:
            # AttributeError: a cluster's client has dropped the connection as the call was about to write to it.
            raise Unavailable("The quota store is unavailable; try again shortly.", code="quota_unavailable") from error
