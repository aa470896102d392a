"""Sweeps over tenants: registration of tenants with leases or usage events in Redis, and the turn to sweep.

A tenant is registered in a sorted set with the time of its registration by Redis' clock. A gateway registers a tenant
before it takes a lease, and again after REGISTER_SECONDS of use. A sweep removes a tenant whose last registration is
older than IDLE_SECONDS and that has neither leases nor events. No event is lost by that: a lease is taken within
REGISTER_SECONDS of a registration, so a lease or an event that the sweep did not find belongs to a later registration,
and an entry that was registered again is not removed. The keys are on different shards of a cluster; no step needs two
of them at once.

Every function raises RedisError and OSError; the callers set the deadlines.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.redis.keys import REGISTERED_TENANTS_BEFORE_KEY, REGISTERED_TENANTS_KEY

# Validity of a registration. It is far below IDLE_SECONDS, because the difference limits the duration of a call.
REGISTER_SECONDS = 60.0
IDLE_SECONDS = 600.0
# Additional validity for tenants of the previous release, whose gateways register a tenant only once in their lives.
BEFORE_SECONDS = 86_400.0
# Maximum number of tenants that one call reads, adds or removes.
PAGE = 500

# KEYS: the sorted set. ARGV: milliseconds to add to the time, then tenants. A later time is not replaced.
REGISTER = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'GT', string.format('%d', now), ARGV[i]) end
return now
"""
# KEYS: the sorted set. ARGV: tenant, time, tenant, time ... A tenant with another time is kept.
REMOVE = """
local removed = 0
for i = 1, #ARGV, 2 do
  if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or -1) == tonumber(ARGV[i + 1]) then
    removed = removed + redis.call('ZREM', KEYS[1], ARGV[i])
  end
end
return removed
"""

Client = Redis | RedisCluster


async def is_first(redis: Client, key: str, seconds: float) -> bool:
    """Return whether no process has called this for `seconds`."""
    return bool(await redis.set(key, b"", nx=True, px=max(1, int(seconds * 1000))))


class Registrations:
    """Tenants that this process has registered within REGISTER_SECONDS."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        # Tenant id -> time (monotonic) of the registration, oldest first.
        self._since: dict[str, float] = {}

    def is_due(self, tenant_id: str, after: float) -> bool:
        """Return whether a tenant must be registered before its next lease.

        after: the time (monotonic) since which Redis has kept its data; earlier registrations may be lost.
        """
        since = self._since.get(tenant_id)
        return since is None or since < max(after, time.monotonic() - REGISTER_SECONDS)

    async def add(self, tenant_ids: Sequence[str]) -> None:
        """Register at most PAGE tenants."""
        # Read the clock before the call, so that the registration in Redis is not older.
        now = time.monotonic()
        await register(self._redis, tenant_ids)
        for tenant_id in tenant_ids:
            self._since.pop(tenant_id, None)
            self._since[tenant_id] = now
        while self._since[oldest := next(iter(self._since))] < now - REGISTER_SECONDS:
            del self._since[oldest]


async def register(redis: Client, tenant_ids: Sequence[Any], ahead: float = 0.0) -> None:
    """Register at most PAGE tenants. ahead: seconds that are added to the time of the registration."""
    await redis.execute_command("EVAL", REGISTER, 1, REGISTERED_TENANTS_KEY, int(ahead * 1000), *tenant_ids)


async def page(redis: Client, cursor: int) -> tuple[int, dict[str, float]]:
    """Return the next cursor (0 at the end) and about PAGE tenants with the times of their registrations.

    A tenant that stays registered during a whole scan is returned at least once.
    """
    answer: Any = await redis.zscan(REGISTERED_TENANTS_KEY, cursor, count=PAGE)
    following, found = answer
    return int(following), {tenant_id.decode(): registered for tenant_id, registered in found}


async def remove(redis: Client, registered: Iterable[tuple[str, float]]) -> int:
    """Remove tenants that were not registered again; return their number."""
    flat: list[Any] = [item for tenant_id, at in registered for item in (tenant_id, int(at))]
    return int(await redis.execute_command("EVAL", REMOVE, 1, REGISTERED_TENANTS_KEY, *flat)) if flat else 0


async def move_page(redis: Client) -> bool:
    """Move some tenants from the set of the previous release; return whether there may be more."""
    ids: Any = await redis.srandmember(REGISTERED_TENANTS_BEFORE_KEY, PAGE)
    if not ids:
        return False
    await register(redis, ids, BEFORE_SECONDS)
    await redis.srem(REGISTERED_TENANTS_BEFORE_KEY, *ids)
    return True
