"""Keys in the database: changes at the same moment as those of their tenant."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.records.database import Database
from gateway.records.keys import keys as keys_module
from gateway.records.keys.keys import ApiKey, Keys
from gateway.records.tenants.tenants import Tenant, Tenants


def key(number: int, tenant: Tenant) -> ApiKey:
    return ApiKey(
        id=f"{number:016x}",
        tenant=tenant,
        label="",
        scopes=frozenset({"inference"}),
        secret_hash=str(number),
        created_at=datetime.now(UTC),
    )


async def test_a_rotation_and_the_end_of_its_tenant_do_not_wait_for_each_other(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    tenants, keys = Tenants(database), Keys(database)
    acme = await tenants.create("acme", {}, "op")
    await keys.add(key(1, acme), "op")
    check, deletions = keys_module._check_new, list[asyncio.Task[None]]()

    async def delete_meanwhile(*args: Any) -> None:
        await check(*args)
        deletions.append(asyncio.create_task(tenants.delete("acme", "op", [])))
        # A deletion that begins later waits for no lock.
        await asyncio.sleep(0.5)

    monkeypatch.setattr(keys_module, "_check_new", delete_meanwhile)
    await keys.replace(key(2, acme), key(1, acme).id, datetime.now(UTC) + timedelta(hours=1), "op")
    await asyncio.gather(*deletions)
    assert await keys.find_all([key(1, acme).id, key(2, acme).id]) == {}
