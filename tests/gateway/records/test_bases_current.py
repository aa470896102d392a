"""Uploads at a gateway whose copy of the base models is older than the table."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.errors import BadRequest, Conflict
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.rows import Reason
from gateway.records.bases.base import FIRST
from gateway.records.bases.records import BaseRecords
from gateway.records.bases.registry import Bases
from gateway.records.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.bases import one_base

CONTENT = {"digest": "a" * 64, "rank": 1, "num_bytes": 1, "actor": "key"}


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
async def uploading(catalog: Catalog, tenant: Tenant, name: str) -> AsyncIterator[asyncio.Event]:
    """Hold an upload in its transaction until the event is set. It is added at the end of the block."""
    published, going_on = asyncio.Event(), asyncio.Event()

    async def publish() -> None:
        published.set()
        await going_on.wait()

    task = asyncio.create_task(catalog.add_version(tenant, name, **CONTENT, publish=publish))
    await published.wait()
    try:
        yield going_on
    finally:
        going_on.set()
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
    records = BaseRecords(database)
    async with uploading(stale, acme, "pirate") as going_on:

        async def retire() -> None:
            await records.change("llama", {"state": "draining"}, "op")
            await records.change("llama", {"state": "retired"}, "op")

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
