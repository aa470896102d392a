"""Uploads at a gateway whose copy of the base models is older than the table."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.errors import BadRequest, Conflict, Unavailable
from gateway.records.adapters import versions
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.rows import Reason
from gateway.records.bases import records
from gateway.records.bases.base import FIRST
from gateway.records.bases.records import BaseRecords
from gateway.records.bases.registry import Bases
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from gateway.setting_errors import NotUsableNow
from testing.gateway.bases import one_base

CONTENT = {"digest": "a" * 64, "rank": 1, "num_bytes": 1, "actor": "key"}


class Publish:
    """A step of an upload that takes until `going_on`."""

    def __init__(self) -> None:
        self.reached, self.going_on = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.reached.set()
        await self.going_on.wait()


@pytest.fixture
async def acme(database: Database) -> Tenant:
    return await Tenants(database).create("acme", {}, "op")


@pytest.fixture
async def stale(database: Database) -> Catalog:
    """Return the catalog of a gateway that knows the base `llama` and no later change."""
    bases = Bases(BaseRecords(database))
    await BaseRecords(database).add(one_base("llama"), "op")
    await bases.refresh()
    return Catalog(database, bases)


@asynccontextmanager
async def holding(catalog: Catalog, tenant: Tenant, name: str, publish: Publish) -> AsyncIterator[asyncio.Task[Any]]:
    """Upload an adapter until `publish.reached`. It goes on at the end of the block."""
    task = asyncio.create_task(catalog.add_version(tenant, name, **CONTENT, publish=publish.run))
    await publish.reached.wait()
    try:
        yield task
    finally:
        publish.going_on.set()


@asynccontextmanager
async def uploading(catalog: Catalog, tenant: Tenant, name: str) -> AsyncIterator[asyncio.Event]:
    """Hold an upload in the transaction that adds it until the event is set. It is added at the end of the block."""
    hold, count = Publish(), versions.count_change

    async def counting(*changed: Any) -> None:
        await hold.run()
        await count(*changed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "count_change", counting)
        task = asyncio.create_task(catalog.add_version(tenant, name, **CONTENT))
        await hold.reached.wait()
    try:
        yield hold.going_on
    finally:
        hold.going_on.set()
        await task


@pytest.mark.parametrize("base", ["pirate", "Pirate", "pirate:prod"])
async def test_no_name_of_a_base_that_was_just_added(database: Database, acme: Tenant, stale: Catalog, base: str):
    await stale.add_version(acme, "poet", **CONTENT)
    await BaseRecords(database).add(one_base(base), "op")
    stale.check_name("pirate")  # the copy in memory lacks it
    with pytest.raises(BadRequest, match="'pirate' is a base model's name; choose another for the adapter") as refused:
        await stale.add_version(acme, "pirate", **CONTENT)
    assert refused.value.param == "name"
    with pytest.raises(BadRequest, match="'pirate' is a base model's name; choose another for the mixture") as refused:
        await stale.mixtures.save(acme, "pirate", "poet*0.5+poet@1*0.5", "key")
    assert refused.value.param == "name"
    with pytest.raises(BadRequest, match="'pirate' is a base model's name; choose another for the adapter"):
        await stale.versions.refuse(acme, "pirate", [Reason(message="wrong shape")])
    assert [each.name for each in await stale.list(acme)] == ["poet"]


async def test_no_base_of_a_name_that_is_being_uploaded(database: Database, acme: Tenant, stale: Catalog):
    async with uploading(stale, acme, "pirate") as going_on:
        adding = asyncio.create_task(BaseRecords(database).add(one_base("pirate"), "op"))
        await asyncio.wait({adding}, timeout=0.5)
        going_on.set()
        with pytest.raises(Conflict, match="'pirate' is an adapter of tenant 'acme'"):
            await adding
    assert (await stale.resolve(acme, "pirate")).digest == CONTENT["digest"]


@pytest.mark.parametrize("state", ["draining", "retired"])
async def test_no_adapter_of_a_base_that_was_just_closed(database: Database, acme: Tenant, stale: Catalog, state: str):
    await stale.add_version(acme, "poet", **CONTENT)
    await BaseRecords(database).change("llama", {"state": state}, "op", force=True)
    published: list[str] = []

    async def publish() -> None:
        published.append("content")

    for name, digest in (("pirate", "b" * 64), ("poet", "b" * 64), ("poet", CONTENT["digest"])):
        with pytest.raises(BadRequest, match=f"base: the base model 'llama' is {state}") as refused:
            await stale.add_version(acme, name, **CONTENT | {"digest": digest}, publish=publish)
        assert (refused.value.param, refused.value.status) == ("base", 400)
    assert published == []
    [poet] = await stale.versions.list(acme, "poet")
    assert poet.version == 1


async def test_a_retirement_sees_the_adapter_that_is_being_uploaded(database: Database, acme: Tenant, stale: Catalog):
    """The base was drained at another gateway while the upload ran."""
    table = BaseRecords(database)
    async with uploading(stale, acme, "pirate") as going_on:

        async def retire() -> None:
            await table.change("llama", {"state": "draining"}, "op")
            await table.change("llama", {"state": "retired"}, "op")

        retiring = asyncio.create_task(retire())
        await asyncio.wait({retiring}, timeout=0.5)
        going_on.set()
        with pytest.raises(Conflict, match="1 versions of adapters belong to 'llama': acme/pirate@1"):
            await retiring


async def test_uploads_do_not_wait_for_each_other(acme: Tenant, stale: Catalog, database: Database):
    if database.dialect == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    other = await Tenants(database).create("other", {}, "op")
    async with uploading(stale, acme, "pirate"):
        async with asyncio.timeout(5):
            await stale.add_version(other, "poet", **CONTENT)
    assert (await stale.resolve(acme, "pirate")).base == FIRST


async def test_a_slow_store_delays_neither_changes_of_bases_nor_other_uploads(
    database: Database, acme: Tenant, stale: Catalog
):
    """Its upload is checked again once the content is stored."""
    other, table = await Tenants(database).create("other", {}, "op"), BaseRecords(database)
    async with holding(stale, acme, "pirate", Publish()) as pirate, holding(stale, acme, "poet", Publish()) as poet:
        async with asyncio.timeout(5):
            await stale.add_version(other, "poet", **CONTENT)
            await table.add(one_base("pirate"), "op")
            await table.ensure(replace(one_base("llama"), tokenizer="/models/llama"))
    assert (await poet).version == 1
    with pytest.raises(BadRequest, match="'pirate' is a base model's name"):
        await pirate
    assert [each.name for each in await stale.list(acme)] == ["poet"]


async def test_a_slow_store_adds_no_adapter_to_a_base_that_was_closed_meanwhile(
    database: Database, acme: Tenant, stale: Catalog
):
    async with holding(stale, acme, "pirate", Publish()) as pirate:
        async with asyncio.timeout(5):
            await BaseRecords(database).change("llama", {"state": "draining"}, "op")
            await BaseRecords(database).change("llama", {"state": "retired"}, "op")
    with pytest.raises(BadRequest, match="base: the base model 'llama' is retired"):
        await pirate


async def test_a_change_does_not_wait_long_for_a_transaction_that_stands_still(
    database: Database, acme: Tenant, stale: Catalog, monkeypatch: pytest.MonkeyPatch
):
    """The database answers, so its outage is not reported."""
    if database.dialect == "sqlite":
        pytest.skip("SQLite's lock has a time-out of its own")
    monkeypatch.setattr(records, "LOCK_SECONDS", 0.2)
    own = replace(one_base("llama"), tokenizer="/models/llama")
    table, bases = BaseRecords(database), Bases(BaseRecords(database), own)
    async with uploading(stale, acme, "pirate"):
        for change in (table.add(one_base("qwen"), "op"), table.change("llama", {"state": "draining"}, "op")):
            with pytest.raises(Unavailable, match=r"cannot be changed at present.*Try again shortly") as refused:
                await change
            assert (refused.value.code, refused.value.headers) == ("base_models_locked", {"Retry-After": "5"})
        with pytest.raises(NotUsableNow, match="LORAPLEX_DATABASE_URL: The base models cannot be changed at present"):
            await bases.start()
    await bases.start()
    assert [each.tokenizer for each in await table.list()] == ["/models/llama"]
