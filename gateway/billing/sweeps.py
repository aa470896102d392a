"""Sweeps over tenants: the tenants that may have leases or usage events in Redis, and the one process that looks.

A tenant is registered in a sorted set with the moment of that, on Redis' clock. A gateway registers a tenant before it
takes a lease, and again after REGISTER_SECONDS of use. A sweep removes a tenant whose last registration is older than
IDLE_SECONDS and that has neither leases nor events. No event is lost by that: a lease is taken within REGISTER_SECONDS
of a registration, so a lease or an event that the sweep has not seen belongs to a later registration, and an entry that
was registered again is not removed. The keys lie on different shards of a cluster; no step needs two of them at once.

Every method raises what its client raises; the callers set the deadlines.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

# Sorted set: tenant id -> when it was registered last (ms).
TENANTS = "loraplex:usage:active"
# The release before kept a set, to which its gateways may add while they are replaced.
TENANTS_BEFORE = "loraplex:usage:tenants"
# A registration is good for so long. Far below IDLE_SECONDS: the difference is what a call may take at most.
REGISTER_SECONDS = 60.0
IDLE_SECONDS = 600.0
# Gateways of the release before register a tenant once and rely on that for as long as they live.
BEFORE_SECONDS = 86_400.0
# Tenants that one call reads, adds or removes.
PAGE = 500

# KEYS: the sorted set. ARGV: milliseconds to add to the moment, then tenants. A later moment stands.
REGISTER = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'GT', string.format('%d', now), ARGV[i]) end
return now
"""
# KEYS: the sorted set. ARGV: tenant, moment, tenant, moment ...; one that was registered since is kept.
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
    """Return whether no other process has asked this for so many seconds."""
    return bool(await redis.set(key, b"", nx=True, px=max(1, int(seconds * 1000))))


class Registrations:
    """The tenants that this process has registered lately."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        # Tenant -> when, on this process' clock, oldest first.
        self._since: dict[str, float] = {}

    def is_due(self, tenant_id: str, after: float) -> bool:
        """Return whether a tenant must be registered before its next lease. after: the moment (monotonic) since which
        Redis is known to have kept its data; earlier registrations may be lost."""
        since = self._since.get(tenant_id)
        return since is None or since < max(after, time.monotonic() - REGISTER_SECONDS)

    async def add(self, tenant_ids: Sequence[str]) -> None:
        """Register at most PAGE tenants."""
        # The moment before the call: Redis' own is not earlier.
        now = time.monotonic()
        await register(self._redis, tenant_ids)
        for tenant_id in tenant_ids:
            self._since.pop(tenant_id, None)
            self._since[tenant_id] = now
        while self._since[oldest := next(iter(self._since))] < now - REGISTER_SECONDS:
            del self._since[oldest]


async def register(redis: Client, tenant_ids: Sequence[Any], ahead: float = 0.0) -> None:
    """Register at most PAGE tenants. ahead: seconds by which their entries are kept longer."""
    await redis.execute_command("EVAL", REGISTER, 1, TENANTS, int(ahead * 1000), *tenant_ids)


async def page(redis: Client, cursor: int) -> tuple[int, dict[str, float]]:
    """Return the next cursor (0 at the end) and about PAGE tenants with the moments of their registrations. A tenant
    that is registered all the while is returned at least once."""
    answer: Any = await redis.zscan(TENANTS, cursor, count=PAGE)
    following, found = answer
    return int(following), {tenant_id.decode(): registered for tenant_id, registered in found}


async def remove(redis: Client, registered: Iterable[tuple[str, float]]) -> int:
    """Remove tenants unless they were registered again; return how many were removed."""
    flat: list[Any] = [item for tenant_id, at in registered for item in (tenant_id, int(at))]
    return int(await redis.execute_command("EVAL", REMOVE, 1, TENANTS, *flat)) if flat else 0


async def move_page(redis: Client) -> bool:
    """Move some tenants from the set of the release before; return whether there may be more."""
    ids: Any = await redis.srandmember(TENANTS_BEFORE, PAGE)
    if not ids:
        return False
    await register(redis, ids, BEFORE_SECONDS)
    await redis.srem(TENANTS_BEFORE, *ids)
    return True
