"""Each tenant's usage events in Redis: put there by the quota's script as it settles, taken away once SQL has them."""

import logging
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisError

from gateway.errors import Unavailable
from gateway.loop_lag import deadline

log = logging.getLogger(__name__)

# The ids of tenants that may have events or leases.
TENANTS = "loraplex:usage:tenants"
# The one field of an entry.
FIELD = b"event"
# Entries read at once.
PAGE = 500


def stream_key(tenant_id: str) -> str:
    """The hash tag keeps a tenant's keys together, so that the quota's script may add to the stream."""
    return f"loraplex:{{{tenant_id}}}:usage"


class UsageStream:
    """Every method raises Unavailable when Redis is away."""

    def __init__(self, redis: Redis | RedisCluster, timeout: float) -> None:
        self._redis = redis
        self._timeout = timeout

    async def tenants(self) -> list[str]:
        return sorted(member.decode() for member in await self._call(self._redis.smembers(TENANTS)))

    async def lengths(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        """Return how many events wait, for each tenant that has any, as far as its part of Redis says."""
        ids = list(tenant_ids)
        found: dict[str, int] = {}
        # In pages, each under a deadline of its own, which so does not depend on the number of tenants.
        for start in range(0, len(ids), PAGE):
            found |= await self._lengths(ids[start : start + PAGE])
        return found

    async def _lengths(self, ids: list[str]) -> dict[str, int]:
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id in ids:
            pipeline.xlen(stream_key(tenant_id))
        found = dict(zip(ids, await self._call(pipeline.execute(raise_on_error=False)), strict=True))
        for tenant_id, error in found.items():
            if isinstance(error, Exception):
                # The others' events do not wait for it.
                log.error("usage events of tenant %s cannot be counted: %s", tenant_id, error)
        return {tenant_id: length for tenant_id, length in found.items() if isinstance(length, int) and length}

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
