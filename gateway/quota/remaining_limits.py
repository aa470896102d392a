"""Remaining amounts of limits, read without a reservation."""

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gateway.errors import Unavailable
from gateway.quota.limits import Limit
from gateway.quota.rolling import DailySpend, day_of
from gateway.quota.usage_backfill import UsageBackfill


class Remaining(msgspec.Struct, frozen=True, gc=False):
    """Remaining amount of a limit, in its unit. reset: ms until the limit is fully available again if nothing more is
    used; for a calendar budget, until its period ends.
    """

    limit: Limit
    remaining: int
    reset: int

    @property
    def used(self) -> int:
        """Return the part that is used or held by running requests."""
        return self.limit.value - self.remaining


async def read_remaining(
    script: Callable[..., Awaitable[Any]], backfill: UsageBackfill, tenant_id: str, limits: Sequence[Limit]
) -> list[Remaining]:
    """Return the remaining amount of each limit, without a change.

    Usage that is missing in Redis is read from the ledger, and not stored in Redis, except for a backfill that is due
    again: a tenant that sends no further request would otherwise be shown too little usage after a loss of Redis.
    script: `QuotaStore.script`. Raises Unavailable for Redis and the ledger.
    """
    if not limits:
        return []
    call = ("peek", *(item for limit in limits for item in (limit.field, limit.value)))
    reply = await script(tenant_id, *call)
    if again := [(limit, since) for limit, since in zip(limits, reply[3::4], strict=True) if since]:
        # Without the ledger, the usage that Redis knows is shown.
        with suppress(Unavailable):
            await backfill.load(tenant_id, again)
        reply = await script(tenant_id, *call)
    found = []
    for limit, (remaining, reset, since, _) in zip(limits, zip(*[iter(reply)] * 4, strict=True), strict=True):
        if since:
            used = await backfill.used(tenant_id, limit, since)
            remaining = max(0, remaining - math.ceil(used.counted))
            if used.days:
                reset = max(reset, DailySpend(day_of(since), used.days).reset(since))
            elif window := limit.kind.window:
                reset += math.ceil(used.counted * window / limit.value / 1000)
        found.append(Remaining(limit, remaining, reset))
    return found
