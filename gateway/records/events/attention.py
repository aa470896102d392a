"""Records that need an operator: budgets nearly spent, keys about to expire, adapters that were rejected."""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sqlalchemy import select

from gateway.records.adapters.rows import State
from gateway.records.database import Database
from gateway.records.keys.expiring import ExpiringKey, expiring_keys
from gateway.records.money.usage_report import UsageReport
from gateway.records.tables import adapter_versions, adapters, tenants
from gateway.records.tenants.tenants import Tenants

BUDGET_PART = 0.8
EXPIRY, REJECTION = timedelta(days=7), timedelta(days=1)
MAX_EACH = 6


class Budget(NamedTuple):
    """Budget of a tenant, in micro-units."""

    tenant: str
    spent: int
    budget: int


class RejectedVersion(NamedTuple):
    """Version of an adapter that a probe rejected."""

    tenant: str
    name: str
    version: int
    at: datetime


class Concerns(NamedTuple):
    """All of these, at most MAX_EACH of each, the most urgent first."""

    budgets: list[Budget]
    keys: list[ExpiringKey]
    rejected: list[RejectedVersion]


class Attention:
    """Queries of these records. Raises Unavailable while the database is away."""

    def __init__(self, database: Database, all_tenants: Tenants, report: UsageReport) -> None:
        self._database = database
        self._tenants = all_tenants
        self._report = report

    async def read(self) -> Concerns:
        now = datetime.now(UTC)
        keys = await expiring_keys(self._database, now, now + EXPIRY, MAX_EACH)
        return Concerns(await self._budgets(now), keys, await self._rejected(now))

    async def _budgets(self, now: datetime) -> list[Budget]:
        month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        budgets = {
            tenant.name: budget
            for tenant in await self._tenants.list()
            if (budget := tenant.limits.budget_per_month) and not tenant.suspended
        }
        if not budgets:
            return []
        sums = await self._report.sums((), since=month)
        found = [
            Budget(row.tenant, row.cost, budgets[row.tenant])
            for row in sums
            if not row.deleted and row.cost >= BUDGET_PART * budgets.get(row.tenant, float("inf"))
        ]
        return sorted(found, key=lambda budget: -budget.spent / budget.budget)[:MAX_EACH]

    async def _rejected(self, now: datetime) -> list[RejectedVersion]:
        rejected: State = "rejected"
        versions = adapter_versions.c
        query = (
            select(tenants.c.name, adapters.c.name, versions.version, versions.created_at)
            .join(adapters, adapters.c.id == versions.adapter_id)
            .join(tenants, tenants.c.id == adapters.c.tenant_id)
            .where(versions.state == rejected, versions.created_at > now - REJECTION)
            .order_by(versions.created_at.desc())
            .limit(MAX_EACH)
        )
        async with self._database.read() as connection:
            return [RejectedVersion(*row) for row in await connection.execute(query)]
