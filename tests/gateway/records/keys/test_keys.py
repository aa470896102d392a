"""Keys in the database: changes at the same moment as those of their tenant or of the same key."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from gateway.access.auth import Authenticator
from gateway.api.key_manager import KeyManager
from gateway.records.caches.changes import Changes
from gateway.records.keys import keys as keys_module
from gateway.records.keys.keys import ApiKey, Keys
from gateway.records.sql.database import Database
from gateway.records.tenants.limits import Limits
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


async def test_a_limit_that_changes_during_a_rotation_is_the_successors_too(migrated_postgres_url: str):
    database = Database(migrated_postgres_url)
    changes = Changes(database)
    auth = Authenticator(Keys(database), "pepper" * 8, None, changes)
    manager = KeyManager(auth=auth, keys=Keys(database), catalog=None)  # type: ignore[arg-type]
    acme = await Tenants(database).create("acme", {}, "op")
    old, _ = auth.issue(acme, frozenset({"inference"}), "before", limits=Limits(max_concurrent=2))
    await Keys(database).add(old, "op")
    other = await asyncpg.connect(migrated_postgres_url.replace("+asyncpg", ""))
    try:
        async with other.transaction():
            await other.execute(
                "UPDATE api_keys SET label = 'after', max_concurrent = 1, limits = $1 WHERE id = $2",
                '{"max_concurrent":1}',
                old.id,
            )
            rotation = asyncio.create_task(manager.rotate(old.id, 60, "op"))
            waits = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            while not await other.fetchval(waits):
                assert not rotation.done()
                await asyncio.sleep(0.02)
        new, _ = await rotation
        stored = await Keys(database).find(new.id)
        assert stored is not None
        assert [(each.label, each.limits.max_concurrent) for each in (new, stored)] == [("after", 1)] * 2
    finally:
        await other.close()
        await changes.close()
        await database.close()
