"""Records that need an operator: budgets nearly spent, refusals by limits, keys about to expire, rejected adapters,
engines that died, and targets of events that fail.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import func, select

from gateway.records.events.deaths import REPORTED, EngineDeaths, engines_that_died
from gateway.records.events.tables import webhooks
from gateway.records.keys.expiring import ExpiringKey, count_expiring_owners, expiring_keys
from gateway.records.requests.refusal_report import RefusalReport, Refused
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions, adapters, tenants
from gateway.records.tenants.list import TenantFilter, TenantLists
from gateway.records.version_state import State

BUDGET_PART = 0.8
EXPIRY, REJECTION, REFUSAL = timedelta(days=7), timedelta(days=1), timedelta(hours=1)
# A younger key that expires soon is meant to: it was made so.
SETTLED = timedelta(days=1)
MAX_EACH = 6
# Failed attempts in a row, 20 s apart in all, from which a target of events fails.
FAILURES = 3


class Budget(NamedTuple):
    """Budget of a tenant, in micro-units. period: "month" and the like."""

    tenant: str
    spent: int
    budget: int
    period: str


class RejectedVersion(NamedTuple):
    """Newest rejected version of a tenant's adapters. more: further ones of the tenant in the last REJECTION."""

    tenant: str
    name: str
    version: int
    at: datetime
    more: int = 0


class FailingTarget(NamedTuple):
    """Target of events whose last attempts failed. tenant: the owner of its events; None: all events."""

    name: str
    tenant: str | None
    failures: int
    error: str


class More(NamedTuple):
    """Number of records of each kind beyond the listed MAX_EACH; for keys and rejected versions, of their owners."""

    budgets: int = 0
    keys: int = 0
    rejected: int = 0
    refused: int = 0
    targets: int = 0
    deaths: int = 0


class Concerns(NamedTuple):
    """Records of all kinds, at most MAX_EACH of each, the most urgent first.

    refused: in the last REFUSAL. deaths: in the last REPORTED.
    """

    budgets: list[Budget]
    keys: list[ExpiringKey]
    rejected: list[RejectedVersion]
    refused: list[Refused]
    targets: list[FailingTarget]
    deaths: list[EngineDeaths]
    more: More = More()


class Attention:
    """Queries of these records. Raises Unavailable while the database is away."""

    def __init__(self, database: Database, lists: TenantLists) -> None:
        self._database = database
        self._lists = lists
        self._refusals = RefusalReport(database)

    async def read(self) -> Concerns:
        now = datetime.now(UTC)
        budgets = [
            Budget(name, use.spent, use.budget, use.period)
            for name, use in await self._lists.over_budget(BUDGET_PART, MAX_EACH)
        ]
        expiry, settled = now + EXPIRY, now - SETTLED
        keys = await expiring_keys(self._database, now, expiry, MAX_EACH, made_before=settled, one_each=True)
        refused = await self._refusals.by_limit(now - REFUSAL, now)
        rejected, num_rejected = await self._rejected(now)
        targets, num_targets = await self._failing()
        deaths = await engines_that_died(self._database, now - REPORTED)
        more = More(
            budgets=await _beyond(budgets, self._count_budgets),
            keys=await _beyond(keys, partial(count_expiring_owners, self._database, now, expiry, made_before=settled)),
            rejected=num_rejected - len(rejected),
            refused=max(0, len(refused) - MAX_EACH),
            targets=num_targets - len(targets),
            deaths=max(0, len(deaths) - MAX_EACH),
        )
        return Concerns(budgets, keys, rejected, refused[:MAX_EACH], targets, deaths[:MAX_EACH], more)

    async def _count_budgets(self) -> int:
        criteria = TenantFilter(over_budget=BUDGET_PART, suspended=False)
        return (await self._lists.page(criteria, limit=1)).total

    async def _failing(self) -> tuple[list[FailingTarget], int]:
        """Return the targets that fail repeatedly, the operators' own first, and the number of all of them."""
        query = (
            select(webhooks.c.name, tenants.c.name.label("tenant"), webhooks.c.failures, webhooks.c.error)
            .add_columns(func.count().over().label("total"))
            .outerjoin(tenants, tenants.c.id == webhooks.c.tenant_id)
            .where(webhooks.c.failures >= FAILURES)
            .order_by(webhooks.c.tenant_id.is_not(None), webhooks.c.failures.desc(), webhooks.c.name)
            .limit(MAX_EACH)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        targets = [FailingTarget(row.name, row.tenant, row.failures, row.error or "unknown") for row in rows]
        return targets, rows[0].total if rows else 0

    async def _rejected(self, now: datetime) -> tuple[list[RejectedVersion], int]:
        """Return the newest rejected version of each tenant, so that one tenant cannot fill the list, and the number of
        these tenants.
        """
        rejected: State = "rejected"
        versions, of_tenant = adapter_versions.c, adapters.c.tenant_id
        order = (versions.created_at.desc(), versions.adapter_id, versions.version.desc())
        newest = func.row_number().over(partition_by=of_tenant, order_by=order)
        found = (
            select(tenants.c.name.label("tenant"), adapters.c.name, versions.version, versions.created_at)
            .add_columns((func.count().over(partition_by=of_tenant) - 1).label("more"), newest.label("number"))
            .join(adapters, adapters.c.id == versions.adapter_id)
            .join(tenants, tenants.c.id == adapters.c.tenant_id)
            .where(versions.state == rejected, versions.created_at > now - REJECTION)
            .subquery()
        )
        columns = (found.c[name] for name in ("tenant", "name", "version", "created_at", "more"))
        query = select(*columns, func.count().over()).where(found.c.number == 1)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(found.c.created_at.desc()).limit(MAX_EACH))).all()
        return [RejectedVersion(*row[:-1]) for row in rows], rows[0][-1] if rows else 0


async def _beyond(found: Sequence[Any], count: Callable[[], Awaitable[int]]) -> int:
    """Return the number of records beyond the found ones. They are counted only if the list is full."""
    return 0 if len(found) < MAX_EACH else max(0, await count() - len(found))
