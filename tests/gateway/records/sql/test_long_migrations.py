"""Migrations of a large database, on PostgreSQL: long statements, and locks that others hold."""

import asyncio
import time

import asyncpg
import pytest
from sqlalchemy import text

from gateway.records.sql import database as database_module
from gateway.records.sql.database import MIGRATION_LOCK, Database
from gateway.setting_errors import NotUsableNow

pytestmark = pytest.mark.integration
# Time-out of the statements of requests, in these tests.
SHORT = 0.5


async def test_a_migration_may_take_longer_than_the_statements_of_requests(migrated_postgres_url: str):
    """An index on a table of ten million rows takes minutes. A time-out would end each attempt at the same place."""
    database = Database(migrated_postgres_url, SHORT)
    try:
        async with database.changing_schema() as connection:
            await connection.execute(text("CREATE TABLE of_a_migration AS SELECT pg_sleep(1.5) IS NULL AS slept"))
        async with database.read() as connection:
            assert (await connection.execute(text("SELECT count(*) FROM of_a_migration"))).scalar_one() == 1
    finally:
        await database.close()


async def test_a_gateway_waits_for_the_migration_of_another(migrated_postgres_url: str):
    database, holder = Database(migrated_postgres_url, SHORT), await asyncpg.connect(migrated_postgres_url)
    try:
        await holder.execute(f"SELECT pg_advisory_lock({MIGRATION_LOCK})")
        upgrade = asyncio.create_task(database.upgrade())
        await asyncio.wait([upgrade], timeout=1.5)
        assert not upgrade.done()
        await holder.execute(f"SELECT pg_advisory_unlock({MIGRATION_LOCK})")
        await asyncio.wait_for(upgrade, 60)
    finally:
        await holder.close()
        await database.close()


async def test_a_migration_that_waits_for_a_reader_gives_way(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    """Every writer of usage queues behind the wait for a table that an export reads."""
    monkeypatch.setattr(database_module, "TABLE_LOCK_SECONDS", SHORT)
    database, holder = Database(migrated_postgres_url), await asyncpg.connect(migrated_postgres_url)
    try:
        async with holder.transaction():
            await holder.execute("SELECT count(*) FROM usage")
            started = time.monotonic()
            with pytest.raises(NotUsableNow, match="lock timeout"):
                async with database.changing_schema() as connection:
                    await connection.execute(text("ALTER TABLE usage ADD COLUMN new INTEGER"))
            assert time.monotonic() - started >= SHORT
    finally:
        await holder.close()
        await database.close()
