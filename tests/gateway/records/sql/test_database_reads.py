"""A tenant's reads leave connections for others, and a key changes only its allowed adapters."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.errors import RecordNotFound
from gateway.records.adapters.catalog import Catalog
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenants
from testing.gateway.bases import only
from testing.gateway.running import Gateway


async def test_a_tenants_reads_take_one_connection_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch):
    tenants = Tenants(database)
    noisy, quiet = await tenants.create("noisy", {}, "op"), await tenants.create("quiet", {}, "op")
    catalog = Catalog(database, only())
    read, at_once, most, hold = database.read, 0, 0, asyncio.Event()

    @asynccontextmanager
    async def slow(**options: Any) -> AsyncIterator[Any]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            await hold.wait()
            async with read(**options) as connection:
                yield connection
        finally:
            at_once -= 1

    monkeypatch.setattr(database, "read", slow)
    listings = (catalog.versions.list(noisy, "none"), catalog.aliases.list(noisy, "none"))
    absent = [asyncio.create_task(listing) for listing in listings]
    many = [asyncio.create_task(catalog.list(noisy)) for _ in range(50)]
    await asyncio.sleep(0.05)
    other = asyncio.create_task(catalog.list(quiet))
    await asyncio.sleep(0.05)
    assert (at_once, most) == (2, 2)
    hold.set()
    assert await other == []
    assert await asyncio.gather(*many) == [[]] * 50
    assert [type(each) for each in await asyncio.gather(*absent, return_exceptions=True)] == [RecordNotFound] * 2
    assert most == 2


async def test_a_key_changes_only_what_it_is_for(gateway: Gateway):
    await gateway.tenant("acme")
    made = await gateway.admin.post("/admin/api/tenants/acme/keys?force=true", {"allowed_models": ["pirate"]})
    narrow = gateway.client(made.json["key"])
    for method in ("GET", "DELETE"):
        got = await narrow.call(method, "/v1/adapters/json")
        assert (got.status, got.error["code"]) == (403, "model_not_allowed")
        assert (await narrow.call(method, "/v1/adapters/pirate")).status == 404
