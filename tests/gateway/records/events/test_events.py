"""Events in the table: one row each, a limited number of a tenant, and none older than three months."""

import asyncio
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select, update

from gateway.records.events.events import MAX_PER_HOUR, Events
from gateway.records.events.tables import event_deliveries, events
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from gateway.records.webhooks.targets import Webhooks


async def record(database: Database, once: str, tenant: Tenant | None = None) -> bool:
    return await Events(database).record(
        "budget.threshold",
        {"threshold": 0.8},
        once=once,
        tenant_id=None if tenant is None else tenant.id,
        tenant=None if tenant is None else tenant.name,
    )


async def states(database: Database) -> list[str]:
    """Return the states of all deliveries."""
    async with database.read() as connection:
        return sorted((await connection.execute(select(event_deliveries.c.state))).scalars())


async def test_an_event_that_many_notice_is_one_row(database: Database):
    for name in ("one", "two"):
        await Webhooks(database).put(name, "https://a.example/", None, None, "admin")
    added = await asyncio.gather(*(record(database, "same") for _ in range(8)))
    assert sorted(added) == [False] * 7 + [True]
    async with database.read() as connection:
        assert (await connection.execute(select(func.count()).select_from(events))).scalar_one() == 1
    assert await states(database) == ["pending", "pending"]


async def test_a_tenant_cannot_fill_the_table(database: Database, acme: Tenant):
    globex = await Tenants(database).create("globex", {}, "a")
    added = [await record(database, f"acme {number}", acme) for number in range(MAX_PER_HOUR + 5)]
    assert sum(added) == MAX_PER_HOUR
    assert await record(database, "globex", globex)


async def test_old_events_are_removed_with_their_deliveries(database: Database):
    await Webhooks(database).put("one", "https://a.example/", None, None, "admin")
    await record(database, "old")
    async with database.write() as connection:
        await connection.execute(update(events).values(created_at=datetime.now(UTC) - timedelta(days=91)))
    await record(database, "new")
    assert await Events(database).sweep() == 1
    assert await states(database) == ["pending"]
