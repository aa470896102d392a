"""Records that need an operator: no tenant fills the list, and a key that was made for hours is no concern."""

from datetime import UTC, datetime, timedelta

from sqlalchemy import insert

from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.rows import Reason
from gateway.records.attention import Attention, RejectedVersion
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys
from gateway.records.tenants.list import TenantLists
from gateway.records.tenants.tenants import Tenant, Tenants


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


async def test_a_key_made_today_for_a_short_time_is_no_concern(database: Database):
    now, hour = datetime.now(UTC), timedelta(hours=1)
    row = {"label": "", "scopes": "usage", "secret_hash": ""}
    for name, age, left in (("short", 0, 2), ("month", 28 * 24, 48), ("long", 24 * 28, 24 * 8)):
        times = {"created_at": now - age * hour, "expires_at": now + left * hour}
        async with database.write() as connection:
            await connection.execute(insert(api_keys).values(row | times | {"id": name}))
    found = (await Attention(database, TenantLists(database)).read()).keys
    assert [key.id for key in found] == ["month"]
