"""Base models on record: their changes, the engines that serve them, and an upgrade from the release before."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config
from msgspec.structs import replace

import migrations
from gateway.errors import Conflict, ModelNotFound, NameTaken, RecordNotFound
from gateway.records.adapters.catalog import Catalog
from gateway.records.bases.base import FIRST, BaseRetired
from gateway.records.bases.records import BaseRecords
from gateway.records.bases.registry import Bases, NoBase
from gateway.records.bases.table import bases as bases_table
from gateway.records.caches.changes import Changes
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenants
from testing.gateway.bases import one_base

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def records(database: Database) -> BaseRecords:
    return BaseRecords(database)


async def test_the_setting_makes_one_row_and_renames_the_only_one(database: Database, records: BaseRecords):
    for name, length in (("llama", 4096), ("llama", 4096), ("llama", 8192), ("renamed", 8192)):
        bases = Bases(records, one_base(name, length))
        await bases.start()
        [base] = await records.list()
        assert (base.id, base.name, base.context_length, base.digest) == (FIRST, name, length, None)
        assert bases.named(name) == base
    await records.add(one_base("qwen"), "op")
    await Bases(records, one_base("qwen", 16)).start()
    with pytest.raises(Conflict, match=r"base on record \(renamed, qwen\)"):
        await Bases(records, one_base("neither")).start()
    with pytest.raises(Conflict):
        # The setting's own values are this process's only.
        await records.ensure(one_base("neither"))
    assert [base.name for base in await records.list()] == ["renamed", "qwen"]


async def test_what_two_bases_may_not_share(database: Database, records: BaseRecords):
    first = await records.add(replace(one_base("llama"), digest=OLD), "op")
    assert first.id == FIRST
    second = await records.add(replace(one_base("qwen"), digest=OTHER), "op")
    assert second.id != FIRST
    with pytest.raises(NameTaken, match="name"):
        await records.add(one_base("llama"), "op")
    await records.change("llama", {"digest": NEW}, "op")
    for digest, kind in ((OLD, "a former"), (NEW, "the")):
        with pytest.raises(NameTaken, match=f"{kind} digest of the base model 'llama'"):
            await records.add(replace(one_base("third"), digest=digest), "op")
        with pytest.raises(NameTaken):
            await records.change("qwen", {"digest": digest}, "op")
    assert (await records.change("llama", {"digest": OLD}, "op")).former == (NEW,)
    with pytest.raises(RecordNotFound):
        await records.change("none", {"state": "draining"}, "op")
    catalog, acme = Catalog(database, Bases(records)), await Tenants(database).create("acme", {}, "op")
    await catalog.add_version(acme, "third", digest=OLD, rank=1, num_bytes=1, actor="key")
    # A base of the last two names would hide an alias and a version of the adapter.
    for name in ("Third", "third:prod", "third@1"):
        with pytest.raises(Conflict, match=f"'{name}' is an adapter of tenant 'acme'"):
            await records.add(one_base(name), "op")


async def test_a_retirement_waits_for_the_drain_and_the_adapters(database: Database, records: BaseRecords):
    bases, tenants = Bases(records), Tenants(database)
    await records.add(one_base("llama"), "op")
    qwen = await records.add(one_base("qwen"), "op")
    await bases.refresh()
    catalog, acme = Catalog(database, bases, Changes(database)), await tenants.create("acme", {}, "op")
    content = {"digest": OLD, "rank": 1, "num_bytes": 1, "actor": "key"}
    for name, base in (("pirate", qwen.id), ("poet", FIRST)):
        assert (await catalog.add_version(acme, name, **content, base=base)).base == base
    with pytest.raises(Conflict, match="'qwen' is active; drain it first"):
        await records.change("qwen", {"state": "retired"}, "op")
    await records.change("qwen", {"state": "draining"}, "op")
    with pytest.raises(Conflict, match="1 versions of adapters belong to 'qwen': acme/pirate@1"):
        await records.change("qwen", {"state": "retired"}, "op")
    assert (await catalog.resolve(acme, "pirate")).base == qwen.id
    await records.change("qwen", {"state": "retired"}, "op", force=True)
    await bases.refresh()
    with pytest.raises(BaseRetired, match="its base model 'qwen' was retired"):
        await catalog.resolve(acme, "pirate")
    with pytest.raises(ModelNotFound):
        await catalog.resolve(acme, "qwen")
    assert (await catalog.resolve(acme, "poet")).base == FIRST
    assert [base.name for base in bases.listed] == ["llama"]
    await records.change("qwen", {"state": "active"}, "op")
    await bases.refresh()
    assert (await catalog.resolve(acme, "pirate")).base == qwen.id


async def test_an_adapter_goes_on_under_a_new_base(database: Database, records: BaseRecords):
    """Equal content for another base is another version."""
    await records.add(one_base("llama"), "op")
    qwen = await records.add(one_base("qwen"), "op")
    catalog, acme = Catalog(database, Bases(records)), await Tenants(database).create("acme", {}, "op")
    content = {"digest": OLD, "rank": 1, "num_bytes": 1, "actor": "key"}
    versions = [await catalog.add_version(acme, "pirate", **content, base=base) for base in (FIRST, FIRST, qwen.id)]
    assert [each.version for each in versions] == [1, 1, 2]


async def test_the_base_of_an_engine(records: BaseRecords):
    bases = Bases(records)
    with pytest.raises(NoBase, match=r"any base model on record; .*base add"):
        bases.served_by("llama", OLD)
    await records.add(one_base("llama"), "op")
    await bases.refresh()
    for model, digest in (("llama", OLD), ("llama", None), (None, None)):
        assert bases.served_by(model, digest).name == "llama"
    await records.add(replace(one_base("qwen"), digest=OLD), "op")
    await records.change("qwen", {"digest": NEW}, "op")
    await bases.refresh()
    served = {
        ("llama", OTHER): "llama",
        ("llama", NEW): "qwen",  # the digest decides, not the name
        ("llama", OLD): "qwen",
        ("qwen", NEW): "qwen",
        ("qwen", None): "qwen",
    }
    assert {each: bases.served_by(*each).name for each in served} == served
    refused = {
        ("qwen", OTHER): "start it with the right model, or `loraplex base replace qwen --digest",
        ("mistral", OTHER): "engine serves mistral, not llama or qwen; add its base model",
        ("mistral", None): "engine serves mistral, not llama or qwen",
        (None, None): "engine serves a model without a name",
    }
    for (model, digest), message in refused.items():
        with pytest.raises(NoBase) as none:
            bases.served_by(model, digest)
        assert message in str(none.value)


@dataclasses.dataclass
class Upgrade:
    revision: str

    def __call__(self, connection: Any) -> None:
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.upgrade(config, self.revision)


async def test_adapters_of_the_release_before_belong_to_the_first_base(database_url: str):
    """Before the upgrade, and beside this release: rows without a base belong to the one of LORAPLEX_BASE_MODEL."""
    database, old = Database(database_url), "'2026-01-01 00:00:00'"
    tenant_columns = "id, name, weight, priority, on_token_limit, suspended, model_limits, created_at"
    version_columns = "adapter_id, version, digest, rank, num_bytes, created_at"
    async with database.write() as connection:
        await connection.run_sync(Upgrade("0019"))
        for statement in (
            f"INSERT INTO tenants ({tenant_columns}) VALUES ('t', 'acme', 1, 0, 'reject', FALSE, '{{}}', {old})",
            f"INSERT INTO adapters (id, tenant_id, name, current_version, created_at) VALUES ('a', 't', 'p', 1, {old})",
            f"INSERT INTO adapter_versions ({version_columns}) VALUES ('a', 1, '{OLD}', 8, 10, {old})",
        ):
            await connection.execute(sqlalchemy.text(statement))
    await database.upgrade()
    bases = Bases(BaseRecords(database), one_base("llama"))
    await bases.start()
    qwen = await BaseRecords(database).add(one_base("qwen"), "op")
    await bases.refresh()
    catalog, acme = Catalog(database, bases), await Tenants(database).get("acme")
    async with database.write() as connection:
        # A gateway of the previous release adds such rows.
        insert = f"INSERT INTO adapter_versions ({version_columns}) VALUES ('a', 2, '{NEW}', 8, 10, {old})"
        await connection.execute(sqlalchemy.text(insert))
    await catalog.add_version(acme, "p", digest=OTHER, rank=1, num_bytes=1, actor="key", base=qwen.id)
    found = [await catalog.resolve(acme, f"p@{version}") for version in (1, 2, 3)]
    assert [bases.name_of(model.base) for model in found] == ["llama", "llama", "qwen"]
    await database.close()


async def test_two_operators_never_give_one_name_or_one_digest_to_two_bases(migrated_url: str):
    """Two gateways change the table at the same moment. On PostgreSQL neither sees the other's uncommitted row."""
    gateways = [Database(migrated_url) for _ in range(2)]
    tables = [BaseRecords(each) for each in gateways]
    # The connections are open, so that the transactions overlap.
    await asyncio.gather(*(each.list() for each in tables))
    try:
        for number in range(10):
            name, digest = f"base-{number}", f"{number:064x}"
            twice = await asyncio.gather(*(each.add(one_base(name), "op") for each in tables), return_exceptions=True)
            assert sorted(type(each).__name__ for each in twice) == ["Base", "NameTaken"], twice
            others = [replace(one_base(f"other-{number}-{i}"), digest=digest) for i in range(2)]
            added = await asyncio.gather(
                *(each.add(other, "op") for each, other in zip(tables, others, strict=True)), return_exceptions=True
            )
            assert sorted(type(each).__name__ for each in added) == ["Base", "NameTaken"], added
            mine, new = await tables[0].add(one_base(f"more-{number}"), "op"), f"f{number:063x}"
            changes = [(tables[0], mine.name), (tables[1], name)]
            changed = await asyncio.gather(
                *(table.change(own, {"digest": new}, "op") for table, own in changes), return_exceptions=True
            )
            assert sorted(type(each).__name__ for each in changed) == ["Base", "NameTaken"], changed
        known = await tables[0].list()
        assert len({each.id for each in known}) == len({each.name for each in known}) == len(known) == 30
    finally:
        for database in gateways:
            await database.close()


async def test_gateways_that_start_at_one_moment_store_one_base(migrated_url: str):
    """Each has LORAPLEX_BASE_MODEL, and the database has no base yet."""
    gateways = [Database(migrated_url) for _ in range(4)]
    try:
        await asyncio.gather(*(each.ping() for each in gateways))
        await asyncio.gather(*(BaseRecords(each).ensure(one_base("llama")) for each in gateways))
        [base] = await BaseRecords(gateways[0]).list()
        assert (base.id, base.name) == (FIRST, "llama")
    finally:
        for database in gateways:
            await database.close()


async def test_a_start_without_a_change_waits_for_no_upload(records: BaseRecords, monkeypatch: pytest.MonkeyPatch):
    """The lock of a change waits for all uploads that run."""
    await records.ensure(one_base("llama"))
    monkeypatch.setattr(records, "_changing", lambda: pytest.fail("it locked the base models"))
    await records.ensure(one_base("llama"))
    with pytest.raises(pytest.fail.Exception):
        await records.ensure(one_base("renamed"))


async def test_a_start_waits_for_a_base_that_is_being_added(database: Database, records: BaseRecords):
    """With a second base, the first is not renamed to the new value of LORAPLEX_BASE_MODEL."""
    await records.add(one_base("llama"), "op")
    async with database.write() as connection:
        row = {column.name: column for column in bases_table.columns if column.name not in ("id", "name")}
        copied = sqlalchemy.select(sqlalchemy.literal("other"), sqlalchemy.literal("qwen"), *row.values())
        await connection.execute(sqlalchemy.insert(bases_table).from_select(["id", "name", *row], copied))
        starting = asyncio.create_task(records.ensure(one_base("renamed")))
        await asyncio.wait({starting}, timeout=0.5)
    with pytest.raises(Conflict, match=r"base on record \(llama, qwen\)"):
        await starting
    assert [base.name for base in await records.list()] == ["llama", "qwen"]
