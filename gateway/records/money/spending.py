"""Spending of all tenants in the present periods of their budgets, for thresholds."""

import time
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from sqlalchemy import select

from gateway.limits.kinds import BUDGET
from gateway.limits.periods import period_start
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import usage_daily

# Lifetime of the cached sums of past days, which change rarely.
PAST_SECONDS = 600.0
# Number of sums decoded without a pause: 1 ms of one core.
AT_ONCE = 500
DAY = timedelta(days=1)
Sums = dict[str, int]


class Spent:
    """Spending in the present periods. past: by kind of budget, the sums before today."""

    def __init__(self, past: Mapping[str, Sums], today: Sums) -> None:
        self._past = past
        self._today = today

    def of(self, kind: str, tenant_id: str) -> int:
        return self._past[kind].get(tenant_id, 0) + self._today.get(tenant_id, 0)

    def changed_since(self, before: "Spent") -> set[str]:
        """Return the tenants whose spending differs from an earlier reading of the same day."""
        pairs = ((self._today, before._today), *((self._past[kind], before._past[kind]) for kind in self._past))
        return {tenant_id for now, then in pairs if now is not then for tenant_id, _ in now.items() ^ then.items()}


class Spending:
    """Reader of sums by tenant id, in micro-units. Every method raises Unavailable.

    It reads the present day each time, and a period's earlier days only after PAST_SECONDS.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        # By kind of budget: the day before which the sums end, the time (monotonic) of their reading, the sums.
        self._past: dict[str, tuple[datetime, float, Sums]] = {}

    async def present(self, now: datetime) -> Spent:
        """Return the spending of all tenants in the present periods of all kinds of budgets."""
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
        past = {kind: await self._before(kind, today) for kind in sorted(BUDGET)}
        return Spent(past, await self._sums(today, today + DAY))

    async def of_tenants(self, kind: str, tenant_ids: Collection[str], now: datetime) -> Sums:
        """Return the spending of some tenants in the present period of a kind of budget."""
        return await self._sums(period_start(kind, now), now + DAY, tenant_ids)

    async def _before(self, kind: str, today: datetime) -> Sums:
        until, read_at, sums = self._past.get(kind, (None, 0.0, {}))
        if until != today or time.monotonic() - read_at > PAST_SECONDS:
            start = period_start(kind, today)
            sums = await self._sums(start, today) if start < today else {}
            self._past[kind] = today, time.monotonic(), sums
        return sums

    async def _sums(self, since: datetime, until: datetime, tenant_ids: Collection[str] | None = None) -> Sums:
        day = usage_daily.c["day"]
        query = select(usage_daily.c.tenant_id, int_sum(usage_daily.c.cost)).where(day >= since, day < until)
        if tenant_ids is not None:
            query = query.where(usage_daily.c.tenant_id.in_(tenant_ids))
        sums: Sums = {}
        async with self._database.read() as connection:
            result = await connection.stream(query.group_by(usage_daily.c.tenant_id))
            async for rows in result.partitions(AT_ONCE):
                sums.update((tenant_id, cost) for tenant_id, cost in rows)
        return sums
