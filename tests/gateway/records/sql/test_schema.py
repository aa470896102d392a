"""The records on SQLite and on PostgreSQL: schema, tenants, names and versions."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from msgspec.structs import replace
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

import migrations as versions
from gateway.errors import BadRequest, ModelNotFound, NameTaken, RecordNotFound
from gateway.records.adapters.catalog import Catalog
from gateway.records.caches.changes import Changes
from gateway.records.sql.database import Database, migrate, upgrade_schema
from gateway.records.sql.schema_version import Migration, migrations, read_revision
from gateway.records.sql.tables import audit, metadata
from gateway.records.tenants.tenants import DEFAULT_LIMITS, Limits, Tenant, Tenants
from gateway.settings import SettingsError
from testing.gateway.bases import only
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream


@pytest.fixture
def tenants(database: Database) -> Tenants:
    return Tenants(database)


async def add(catalog: Catalog, tenant: Tenant, name: str, digest: str) -> Any:
    return await catalog.add_version(tenant, name, digest=digest * 64, rank=8, num_bytes=10, actor="a")


async def actions(database: Database) -> list[tuple[str, str, str]]:
    async with database.read() as connection:
        rows = await connection.execute(select(audit.c.actor, audit.c.action, audit.c.target).order_by(audit.c.at))
        return [tuple(row) for row in rows.all()]


async def test_the_migrations_make_the_tables_we_use(database: Database):
    def differences(connection: Any) -> list[Any]:
        return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata)

    connection: AsyncConnection
    async with database.read() as connection:
        assert await connection.run_sync(differences) == []


def test_the_known_versions_are_alembics():
    scripts = ScriptDirectory(str(Path(versions.__file__).parent)).walk_revisions()
    assert migrations() == [Migration(each.revision, (each.doc or "").splitlines()[0]) for each in scripts]


async def test_the_version_of_a_schema_is_alembics(database_url: str):
    def both(connection: Any) -> tuple[str | None, str | None]:
        return read_revision(connection), MigrationContext.configure(connection).get_current_revision()

    database = Database(database_url)
    async with database.changing_schema() as connection:
        assert await connection.run_sync(both) == (None, None)
    async with database.changing_schema() as connection:
        await connection.run_sync(upgrade_schema, "0007")
        assert await connection.run_sync(both) == ("0007", "0007")
    await database.close()


async def test_migrating_again_and_at_once_is_harmless(database_url: str):
    databases = [Database(database_url) for _ in range(4)]
    await asyncio.gather(*(database.upgrade() for database in databases))
    await databases[0].upgrade()
    for database in databases:
        await database.check_schema()
        await database.close()


async def test_an_unmigrated_database_says_what_to_do(database_url: str):
    database = Database(database_url)
    with pytest.raises(SettingsError, match="loraplex migrate") as refused:
        await database.check_schema()
    assert refused.value.field == "LORAPLEX_DATABASE_URL"
    await database.close()


async def become_newer(database: Database, oldest_program: str) -> None:
    """Give the database the schema of a newer release, which supports programs from `oldest_program` on."""
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        await connection.execute(text("UPDATE schema_support SET oldest_program = :o"), {"o": oldest_program})
        await connection.execute(text("ALTER TABLE usage ADD COLUMN of_a_newer_release VARCHAR(8)"))


async def test_a_program_runs_on_the_schema_of_a_newer_release_that_supports_it(
    database_url: str, tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    database = Database(database_url)
    await database.upgrade()
    await become_newer(database, migrations()[0].revision)
    # Migrating, as the job of a rollback does, leaves the schema as it is.
    await database.upgrade()
    assert await database.revision() == "9999"
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url, database_url=database_url)) as gateway:
        acme = await gateway.tenant("acme")
        assert (await acme.chat()).status == 200

        async def written() -> bool:
            return bool(await acme.usage())

        await until(written)
    await database.close()


async def test_a_schema_from_the_future_is_refused_in_one_line(database_url: str):
    database = Database(database_url)
    await database.upgrade()
    await become_newer(database, "9998")
    for ask in (database.check_schema, database.upgrade):
        with pytest.raises(SettingsError) as refused:
            await ask()
        assert str(refused.value) == (
            "LORAPLEX_DATABASE_URL: schema is at 9999, of a newer release that supports programs of schema 9998 and "
            f"later; this program is of {migrations()[0].revision}: install a newer release"
        )
    await database.close()


async def test_a_gateway_migrates_an_empty_database_at_its_start(
    database_url: str, tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url, database_url=database_url)) as gateway:
        acme = await gateway.tenant("acme")
        assert (await acme.get("/v1/models")).status == 200


@pytest.mark.parametrize("url", ["postgresql://u:hunter2@127.0.0.1:1/x", "sqlite:////proc/nope/x.db"])
def test_a_database_that_cannot_be_reached_is_a_setting(url: str):
    with pytest.raises((SettingsError, OSError)) as refused:
        migrate(url)
    assert "hunter2" not in str(refused.value)


async def test_what_a_name_means_changes_at_once_where_it_was_changed(database: Database, tenants: Tenants):
    """A change of a name is effective at once in its own process, although nothing watches for changes there."""
    catalog = Catalog(database, only(), Changes(database))
    acme = await tenants.create("acme", {}, actor="op")
    await add(catalog, acme, "tuned", "1")
    assert (await catalog.resolve(acme, "tuned")).digest == "1" * 64
    await add(catalog, acme, "tuned", "2")
    assert (await catalog.resolve(acme, "tuned")).digest == "2" * 64
    await catalog.delete(acme, "tuned", "a")
    with pytest.raises(ModelNotFound):
        await catalog.resolve(acme, "tuned")


async def test_a_tenant_from_birth_to_death(tenants: Tenants, catalog: Catalog, database: Database):
    made = await tenants.create("acme", {"weight": 2.0, "tokens_per_day": 5}, actor="op")
    assert await tenants.get("acme") == made
    with pytest.raises(NameTaken):
        await tenants.create("acme", {}, actor="op")
    changed = await tenants.update("acme", {"max_concurrent": 3}, actor="op")
    own = replace(made.own, max_concurrent=3)
    assert changed == replace(made, limits=replace(DEFAULT_LIMITS, tokens_per_day=5, max_concurrent=3), own=own)
    of_pirate = {"pirate": Limits(requests_per_minute=1)}
    changes = {"requests_per_minute": None, "suspended": True, "priority": 9, "model_limits": of_pirate}
    changed = await tenants.update("acme", changes | {"ttft_target": 0.5}, actor="op")
    assert (changed.limits.requests_per_minute, changed.suspended, changed.priority) == (None, True, 9)
    assert (await tenants.get("acme")).ttft_target == 0.5
    assert (await tenants.get("acme")).model_limits == of_pirate
    await add(catalog, made, "pirate", "a")
    await tenants.delete("acme", "op", ["base"])
    for gone in (
        tenants.get("acme"),
        tenants.delete("acme", "op", ["base"]),
        tenants.update("acme", {"weight": 1.0}, "op"),
    ):
        with pytest.raises(RecordNotFound):
            await gone
    with pytest.raises(ModelNotFound):
        await catalog.resolve(made, "pirate")
    assert [row[1] for row in await actions(database)] == [
        "tenant.create",
        "tenant.update",
        "tenant.suspend",
        "tenant.update",
        "adapter.push",
        "tenant.delete",
    ]


async def test_names_that_are_none(tenants: Tenants, catalog: Catalog):
    acme = await tenants.create("acme", {}, actor="op")
    for name in ("", "UPPER", "sp ace", "-x", "a" * 65, "nul\0", "../up", "a/b", "ü"):
        with pytest.raises(BadRequest) as refused:
            await tenants.create(name, {}, actor="op")
        assert refused.value.param == "name"
        with pytest.raises(BadRequest) as refused:
            catalog.check_name(name)
        assert refused.value.param == "name"
        with pytest.raises(ModelNotFound):
            await catalog.resolve(acme, name)
        with pytest.raises(RecordNotFound):
            await catalog.get(acme, name)
        with pytest.raises(RecordNotFound):
            await tenants.get(name)


async def test_names_are_each_tenants_own(tenants: Tenants, catalog: Catalog):
    acme, globex = await tenants.create("acme", {}, "op"), await tenants.create("globex", {}, "op")
    await add(catalog, acme, "pirate", "a")
    await add(catalog, globex, "pirate", "b")
    await add(catalog, globex, "only-globex", "a")
    assert (await catalog.resolve(acme, "pirate")).digest == "a" * 64
    assert (await catalog.resolve(globex, "pirate")).digest == "b" * 64
    assert (await catalog.resolve(acme, "base")).digest is None
    with pytest.raises(ModelNotFound):
        await catalog.resolve(acme, "only-globex")
    await catalog.delete(acme, "pirate", "op")
    assert [adapter.name for adapter in await catalog.list(globex)] == ["only-globex", "pirate"]
    assert await catalog.list(acme) == []


async def test_versions(tenants: Tenants, catalog: Catalog):
    acme = await tenants.create("acme", {}, "op")
    assert (await add(catalog, acme, "pirate", "a")).version == 1
    assert (await add(catalog, acme, "pirate", "a")).version == 1
    assert (await add(catalog, acme, "pirate", "b")).version == 2
    assert (await catalog.get(acme, "pirate")).digest == "b" * 64
    assert (await add(catalog, acme, "pirate", "a")).version == 3
    await catalog.delete(acme, "pirate", "op")
    # A number is never reused.
    assert (await add(catalog, acme, "pirate", "c")).version == 4


async def test_uploads_of_one_name_at_once_are_versions_of_it(tenants: Tenants, catalog: Catalog):
    acme = await tenants.create("acme", {}, "op")
    made = await asyncio.gather(*(add(catalog, acme, "pirate", digit) for digit in "0123456"))
    assert sorted(adapter.version for adapter in made) == [1, 2, 3, 4, 5, 6, 7]
    assert (await catalog.get(acme, "pirate")).version == 7


async def test_the_base_models_name_is_not_an_adapters(catalog: Catalog):
    with pytest.raises(BadRequest, match="base model"):
        catalog.check_name("base")


async def test_sqlite_makes_its_folder(tmp_path: Path):
    await asyncio.to_thread(migrate, f"sqlite:///{tmp_path}/not/yet/there.db")
    assert (tmp_path / "not" / "yet" / "there.db").is_file()


async def test_a_database_that_cannot_be_used_is_said_in_one_line(tmp_path: Path):
    (tmp_path / "none.db").write_bytes(b"this is no database, though it is as long as one's head. " * 20)
    for url in (f"sqlite:///{tmp_path}/none.db", "postgresql://someone:secret-of-tests@127.0.0.1:1/nowhere"):
        database = Database(url)
        for ask in (database.upgrade, database.check_schema):
            with pytest.raises(SettingsError) as refused:
                await ask()
            assert "\n" not in str(refused.value)
            assert "Background" not in str(refused.value)
            assert "secret" not in str(refused.value)
        await database.close()


async def test_a_schema_that_is_new_already_is_nothing_to_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    database = Database(f"sqlite:///{tmp_path}/a.db")
    await database.upgrade()
    assert [record.getMessage().split(" from ")[0] for record in caplog.records] == [
        "the schema of the database was migrated"
    ]
    caplog.clear()
    await database.upgrade()
    await database.check_schema()
    assert caplog.records == []
    await database.close()
