"""A quota for its tests, on a single Valkey or on a cluster."""

import uuid
from typing import Any

from gateway.quota.demand import RequestSize
from gateway.quota.quota import Quota
from gateway.quota.reservation import Reservation
from gateway.redis.client import Client


async def take(quota: Quota, who: Any, tokens: int = 1, **options: Any) -> Reservation:
    """Reserve a request of this many tokens, all of them completion."""
    request_id = options.pop("request_id", None) or uuid.uuid4().hex
    model, note = options.pop("model", "base"), options.pop("note", None)
    return await quota.acquire(who, model, request_id, RequestSize(0, tokens, **options), note)


async def settle(quota: Quota, reservation: Reservation, tokens: int, cost: int = 0, **options: Any) -> bytes | None:
    return await quota.settle(reservation, tokens=tokens, cost=cost, event=b"{}", **options)


async def dump(redis: Client, who: Any) -> dict[str, Any]:
    """Return everything stored about a tenant, by the last part of its key."""
    tag = f"loraplex:{{{who.tenant.id}}}:"
    kept = {
        "quota": await redis.hgetall(tag + "quota"),
        "leases": await redis.zrange(tag + "leases", 0, -1, withscores=True),
        "held": await redis.hgetall(tag + "held"),
        "usage": await redis.xrange(tag + "usage"),
        "abandoned": await redis.zrange(tag + "abandoned", 0, -1),
    }
    return {part: content for part, content in kept.items() if content}
