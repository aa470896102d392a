"""A tenant's room for adapters, on SQLite and PostgreSQL: concurrent uploads cannot exceed a limit together."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from gateway.errors import AdapterLimitExceeded
from gateway.records.adapters.catalog import Adapter, Catalog
from gateway.records.adapters.limits import KEPT_VERSIONS
from gateway.records.sql.database import Database
from gateway.records.sql.tables import tenants as table
from gateway.records.tenants.limits import AdapterLimits
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.bases import only


async def add(catalog: Catalog, tenant: Tenant, name: str, number: int) -> Adapter:
    return await catalog.add_version(tenant, name, digest=f"{number:064x}", rank=4, num_bytes=100, actor="test")


async def test_uploads_at_once_cannot_pass_a_limit_together(database: Database):
    tenants, catalog = Tenants(database), Catalog(database, only())
    for field, value in (("max_adapters", 3), ("max_adapter_bytes", 300)):
        tenant = await tenants.create(f"t-{field}".replace("_", "-"), {field: value}, "test")
        adding = (add(catalog, tenant, f"a{number}", number) for number in range(8))
        results = await asyncio.gather(*adding, return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert len(await catalog.list(tenant)) == 3
        assert {type(error) for error in refused} == {AdapterLimitExceeded}
        assert {error.param for error in refused if isinstance(error, AdapterLimitExceeded)} == {field}


async def test_a_name_keeps_its_newest_versions(database: Database):
    tenants, catalog = Tenants(database), Catalog(database, only())
    tenant = await tenants.create("acme", {"max_adapter_bytes": KEPT_VERSIONS * 100 + 100}, "test")
    for number in range(KEPT_VERSIONS + 10):
        await add(catalog, tenant, "a", number)
    digests = [f"{number:064x}" for number in range(KEPT_VERSIONS + 10)]
    assert await catalog.referenced(digests, datetime.now(UTC)) == set(digests[10:])


async def test_removed_bytes_count_until_they_are_collected(database: Database):
    """Removed bytes count until collection: the store holds up to twice the limit, so a tenant can replace all."""
    tenants, catalog = Tenants(database), Catalog(database, only())
    tenant = await tenants.create("acme", {"max_adapter_bytes": 300}, "test")
    other = await tenants.create("other", {"max_adapter_bytes": 300}, "test")
    for number in range(6):
        if number == 3:
            for name in ("a0", "a1", "a2"):
                await catalog.delete(tenant, name, "test")
        await add(catalog, tenant, f"a{number}", number)
    for number in (0, 3):
        await add(catalog, other, f"a{number}", number)
    for name in ("a3", "a4", "a5"):
        await catalog.delete(tenant, name, "test")
    for number in range(6, 9):
        with pytest.raises(AdapterLimitExceeded, match="still holds 600 of removed versions"):
            await add(catalog, tenant, f"a{number}", number)
    # Its own content that is still in the store takes no further room.
    await add(catalog, tenant, "again", 4)
    await catalog.delete(tenant, "again", "test")
    deleted = datetime.now(UTC)
    digests = [f"{number:064x}" for number in range(6)]
    assert await catalog.referenced(digests, deleted - timedelta(hours=1)) == set(digests)
    assert await catalog.referenced(digests, deleted) == {digests[0], digests[3]}
    await catalog.collected(deleted - timedelta(hours=1))
    with pytest.raises(AdapterLimitExceeded):
        await add(catalog, tenant, "early", 9)
    await catalog.collected(deleted)
    for number in range(6, 9):
        await add(catalog, tenant, f"a{number}", number)


async def test_a_tenant_of_the_release_before_has_the_defaults(database: Database):
    tenants = Tenants(database)
    await tenants.create("acme", {"max_adapters": 1}, "test")
    async with database.write() as connection:
        await connection.execute(update(table).values(adapter_limits=None))
    assert (await tenants.get("acme")).adapter_limits == AdapterLimits()
    changed = await tenants.update("acme", {"max_adapters": None}, "test")
    assert changed.adapter_limits == AdapterLimits(max_adapters=None)
