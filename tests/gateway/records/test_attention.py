"""Records that need an operator: no tenant fills the list, and a key that was made for hours is no concern."""

from datetime import UTC, datetime, timedelta

from sqlalchemy import insert

from gateway.billing.writer import UsageWriter
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.rows import Reason
from gateway.records.attention import MAX_EACH, Attention, More, RejectedVersion
from gateway.records.keys.expiring import expiring_keys
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys
from gateway.records.tenants.list import TenantLists
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.rows import row


async def test_rejected_uploads_are_one_entry_for_each_tenant(database: Database, catalog: Catalog, acme: Tenant):
    globex = await Tenants(database).create("globex", {}, "op")
    await catalog.versions.refuse(globex, "brief", [Reason(message="no")])
    for name in ("pirate", "pirate", "json", "pirate"):
        await catalog.versions.refuse(acme, name, [Reason(message="no")])
    found = (await Attention(database, TenantLists(database)).read()).rejected
    assert [each._replace(at=found[0].at) for each in found] == [
        RejectedVersion("acme", "pirate", 3, found[0].at, more=3),
        RejectedVersion("globex", "brief", 1, found[0].at, more=0),
    ]


async def add_key(database: Database, name: str, age: float, left: float, tenant: Tenant | None = None) -> None:
    """Add a key. age, left: hours since its creation and until it expires."""
    now, hour = datetime.now(UTC), timedelta(hours=1)
    values = {"id": name, "label": "", "scopes": "usage", "secret_hash": "", "tenant_id": tenant and tenant.id}
    async with database.write() as connection:
        times = {"created_at": now - age * hour, "expires_at": now + left * hour}
        await connection.execute(insert(api_keys).values(values | times))


async def test_a_key_made_today_for_a_short_time_is_no_concern(database: Database):
    for name, age, left in (("short", 0, 2), ("month", 28 * 24, 48), ("long", 24 * 28, 24 * 8)):
        await add_key(database, name, age, left)
    found = (await Attention(database, TenantLists(database)).read()).keys
    assert [key.id for key in found] == ["month"]


async def test_expiring_keys_are_one_entry_for_each_tenant(database: Database, acme: Tenant):
    """A tenant that makes keys for a week hid all other keys."""
    globex = await Tenants(database).create("globex", {}, "op")
    for number in range(MAX_EACH + 1):
        await add_key(database, f"many-{number}", 48, 24 + number, acme)
    await add_key(database, "globex", 48, 60, globex)
    for name in ("admin-1", "admin-2"):
        await add_key(database, name, 48, 70)
    found = (await Attention(database, TenantLists(database)).read()).keys
    shown = [(key.id, key.tenant, key.more) for key in found]
    assert shown == [
        ("many-0", "acme", MAX_EACH),
        ("globex", "globex", 0),
        ("admin-1", None, 0),
        ("admin-2", None, 0),
    ]
    # Events of other keys come before those of the tenant's second key.
    now = datetime.now(UTC)
    of_events = await expiring_keys(database, now, now + timedelta(days=7), 5)
    assert [key.id for key in of_events] == ["many-0", "globex", "admin-1", "admin-2", "many-1"]


async def test_records_beyond_the_listed_ones_are_counted(database: Database, catalog: Catalog):
    rows = []
    for number in range(MAX_EACH + 2):
        terms = {"budget_per_month": 100}
        tenant = await Tenants(database).create(f"t{number}", terms, "op")
        await catalog.versions.refuse(tenant, "pirate", [Reason(message="no")])
        for name in ("first", "second"):
            await add_key(database, f"{number}-{name}", 48, 24, tenant)
        rows.append(
            row(f"req_{number}", tenant_id=tenant.id, tenant=tenant.name, cost=90, created_at=datetime.now(UTC))
        )
    attention = Attention(database, TenantLists(database))
    found = await attention.read()
    assert (len(found.keys), len(found.rejected)) == (MAX_EACH, MAX_EACH)
    assert found.more == More(budgets=0, keys=2, rejected=2)
    await UsageWriter(database).write(rows)
    found = await attention.read()
    assert (len(found.budgets), found.more.budgets) == (MAX_EACH, 2)
