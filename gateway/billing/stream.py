"""Stream of each tenant's usage events in Redis.

The quota's script adds an event at settlement; the ledger removes it once SQL has it.
"""

import heapq
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.error_codes import QUOTA_UNAVAILABLE
from gateway.errors import Unavailable
from gateway.process.loop_lag import deadline
from gateway.redis import sweeps
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import USAGE_BACKLOG_KEY, USAGE_BACKLOG_OF_TENANTS_KEY, USAGE_SWEEPER_KEY, leases_key, usage_key

log = logging.getLogger(__name__)

# Time for which published numbers of events are valid, and the most tenants with a number of their own.
BACKLOG_SECONDS = 60
MAX_PUBLISHED = 100
# The only field of an entry.
FIELD = b"event"
# Maximum number of entries in one read.
PAGE = 500


class UsageStream:
    """Usage streams of all tenants. Every method raises Unavailable if Redis is away.

    Deadlines apply to single pages, so they do not depend on the number of tenants.
    """

    def __init__(self, redis: Redis | RedisCluster, timeout: float) -> None:
        self._redis = redis
        self._timeout = timeout

    async def tenants(self) -> list[str]:
        """Return the tenants that may have leases or events, sorted."""
        return sorted({tenant_id async for page in self._pages() for tenant_id in page})

    async def is_first(self, seconds: float) -> bool:
        """Return whether it is this process's turn to sweep: no other has asked or published for `seconds`."""
        return bool(await self._call(sweeps.is_first(self._redis, USAGE_SWEEPER_KEY, seconds)))

    async def backlog(self) -> tuple[int, dict[str, int]]:
        """Return the last published numbers of events: in all streams, and of the tenants with the most events."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(USAGE_BACKLOG_KEY)
        pipeline.get(USAGE_BACKLOG_OF_TENANTS_KEY)
        total, of_tenants = await self._call(pipeline.execute())
        return int(total or 0), msgspec.json.decode(of_tenants or b"{}", type=dict[str, int])

    async def publish(self, backlog: int, of_tenants: Mapping[str, int], seconds: float) -> None:
        """Publish the backlog to all processes, and keep the turn to sweep for another `seconds`."""
        most = dict(heapq.nlargest(MAX_PUBLISHED, of_tenants.items(), key=lambda item: item[1]))
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(USAGE_BACKLOG_KEY, backlog, ex=BACKLOG_SECONDS)
        pipeline.set(USAGE_BACKLOG_OF_TENANTS_KEY, msgspec.json.encode(most), ex=BACKLOG_SECONDS)
        pipeline.set(USAGE_SWEEPER_KEY, b"", px=max(1, int(seconds * 1000)))
        await self._call(pipeline.execute())

    async def move_tenants(self) -> None:
        """Move the tenants that gateways of the previous release have registered."""
        while await self._call(sweeps.move_page(self._redis)):
            pass

    async def lengths(self) -> AsyncIterator[dict[str, int]]:
        """Yield pages of the number of waiting events, by tenant. Tenants whose shard fails are left out."""
        seconds, _ = await self._call(self._redis.time())
        idle_before = (seconds - sweeps.IDLE_SECONDS) * 1000
        async for tenants in self._pages():
            yield await self._lengths(tenants, idle_before)

    async def _lengths(self, tenants: dict[str, float], idle_before: float) -> dict[str, int]:
        """Return the lengths of a page's streams. idle_before: the time (ms) before which a registration is old."""
        old = [tenant_id for tenant_id, registered in tenants.items() if registered < idle_before]
        # Count leases before streams: a request that is settled between the two counts is then in the stream.
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id in old:
            pipeline.zcard(leases_key(tenant_id))
        for tenant_id in tenants:
            pipeline.xlen(usage_key(tenant_id))
        answers = await self._call(pipeline.execute(raise_on_error=False))
        leases = dict(zip(old, answers[: len(old)], strict=True))
        lengths = dict(zip(tenants, answers[len(old) :], strict=True))
        for tenant_id, error in lengths.items():
            if isinstance(error, Exception):
                # An error of one tenant must not stop the others.
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
        """Yield pages of (entry id, event) that are at least `min_age` seconds old by Redis' clock, oldest first."""
        seconds, microseconds = await self._call(self._redis.time())
        newest = int((seconds + microseconds / 1e6 - min_age) * 1000)
        start = "-"
        while True:
            page = await self._call(self._redis.xrange(usage_key(tenant_id), start, f"{newest}", count=PAGE))
            if page:
                yield [(entry_id, fields.get(FIELD, b"")) for entry_id, fields in page]
            if len(page) < PAGE:
                return
            start = b"(" + page[-1][0]

    async def remove(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Remove entries, given as (tenant id, entry id), that SQL has."""
        by_tenant: dict[str, list[bytes]] = {}
        for tenant_id, entry_id in entries:
            by_tenant.setdefault(tenant_id, []).append(entry_id)
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id, ids in by_tenant.items():
            pipeline.xdel(usage_key(tenant_id), *ids)
        await self._call(pipeline.execute())

    async def _call(self, call: Awaitable[Any]) -> Any:
        try:
            async with deadline(self._timeout):
                return await call
        except (*REDIS_ERRORS, AttributeError) as error:
            # A cluster's client raises AttributeError if it drops a connection that a call is about to write to.
            raise Unavailable("The quota store is unavailable; try again shortly.", code=QUOTA_UNAVAILABLE) from error
