"""Saved mixtures on SQLite and PostgreSQL: names, resolution, compare-and-swap, protection of their parts, races."""

import asyncio

import pytest

from gateway.errors import (
    AdapterInUse,
    BadRequest,
    ModelNotFound,
    PreconditionFailed,
    PreconditionRequired,
    RecordNotFound,
)
from gateway.records.adapters import saved_mixtures
from gateway.records.adapters.aliases import AliasTarget
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.mixtures import resolve_model
from gateway.records.adapters.rows import Reason
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.versions import add


async def test_a_saved_name_is_its_text(catalog: Catalog, acme: Tenant, database: Database):
    await add(catalog, acme, "a", 1, 2)
    await add(catalog, acme, "b", 3)
    await catalog.aliases.move(acme, "a", "prod", [AliasTarget(1, 50), AliasTarget(2, 50)], "key")
    text = "a:prod*.7+b@1*0.30+a*-1e-1"
    saved, is_new = await catalog.mixtures.save(acme, "blend", text, "key")
    assert is_new
    for user in [f"user {number}" for number in range(20)]:
        spelled = await resolve_model(catalog, acme, text, user)
        for _ in range(2):
            named = await resolve_model(catalog, acme, "blend", user)
            assert (named.digest, named.name, named.names) == (spelled.digest, spelled.name, spelled.names), user
            assert (named.versions, named.shown) == (spelled.versions, "blend")
    assert len({(await resolve_model(catalog, acme, "blend", f"u{number}")).digest for number in range(30)}) == 2
    assert await catalog.mixtures.list(acme) == [saved] == [await catalog.mixtures.get(acme, "blend")]
    # A replacement counts at once, in a gateway that has the name cached.
    with pytest.raises(PreconditionRequired, match="blend is a:prod"):
        await catalog.mixtures.save(acme, "blend", "a*1", "key")
    with pytest.raises(PreconditionFailed):
        await catalog.mixtures.save(acme, "blend", "a*1", "key", '"x"')
    other, is_new = await catalog.mixtures.save(acme, "blend", "a@1*1", "key", saved.etag)
    assert (is_new, other.etag != saved.etag) == (False, True)
    assert (await resolve_model(catalog, acme, "blend")).versions == (("a", 1),)
    with pytest.raises(PreconditionFailed):
        await catalog.mixtures.delete(acme, "blend", "key", saved.etag)
    await catalog.mixtures.delete(acme, "blend", "key", other.etag)
    with pytest.raises(ModelNotFound):
        await resolve_model(catalog, acme, "blend")
    with pytest.raises(RecordNotFound):
        await catalog.mixtures.delete(acme, "blend", "key")
    # The name is free for an adapter.
    await add(catalog, acme, "blend", 4)
    assert (await resolve_model(catalog, acme, "blend")).digest == f"{4:064x}"


async def test_names_and_parts_that_are_refused(
    catalog: Catalog, acme: Tenant, database: Database, monkeypatch: pytest.MonkeyPatch
):
    globex = await Tenants(database).create("globex", {}, "op")
    await add(catalog, acme, "a", 1)
    await add(catalog, globex, "theirs", 2)
    await catalog.mixtures.save(acme, "blend", "a*1", "key")
    for text in ("theirs*1", "a@2*1", "a:prod*1", "none*1+a*1"):
        with pytest.raises(ModelNotFound):
            await catalog.mixtures.save(acme, "other", text, "key")
    for text in ("a", "", "a*x", "blend*1", "a*1+blend*1", "base:x:y*1", "+".join(["a*0.1"] * 9), "a*0." + "1" * 300):
        with pytest.raises(Exception, match="model") as refused:
            await catalog.mixtures.save(acme, "other", text, "key")
        assert not isinstance(refused.value, ModelNotFound), text
    with pytest.raises(BadRequest, match="expected an adapter in each term, got the base model 'base'"):
        await catalog.mixtures.save(acme, "other", "a*1+base*1", "key")
    with pytest.raises(BadRequest, match="at most 256 characters"):
        catalog.mixtures.parse("+".join(f"{'a' * 60}@{number}*0.1" for number in range(1, 6)))
    with pytest.raises(BadRequest, match="is an adapter"):
        await catalog.mixtures.save(acme, "a", "a*1", "key")
    with pytest.raises(BadRequest, match="is a saved mixture"):
        await add(catalog, acme, "blend", 1)
    with pytest.raises(BadRequest, match="is a saved mixture"):
        await catalog.versions.refuse(acme, "blend", [Reason(message="bad")])
    # A refused upload does not take a name.
    await catalog.versions.refuse(acme, "late", [Reason(message="bad")])
    await catalog.mixtures.save(acme, "late", "a*1", "key")
    assert (await resolve_model(catalog, acme, "late")).shown == "late"
    with pytest.raises(BadRequest, match="is a saved mixture"):
        await add(catalog, acme, "late", 1)
    await catalog.mixtures.delete(acme, "late", "key")
    with pytest.raises(ModelNotFound):
        await resolve_model(catalog, globex, "blend")
    with pytest.raises(BadRequest, match="is a saved mixture"):
        await resolve_model(catalog, acme, "blend*1")
    with pytest.raises(ModelNotFound):
        await resolve_model(catalog, globex, "blend*1")
    monkeypatch.setattr(saved_mixtures, "MAX_SAVED", 2)
    await catalog.mixtures.save(acme, "second", "a*1", "key")
    with pytest.raises(BadRequest, match="at most 2"):
        await catalog.mixtures.save(acme, "third", "a*1", "key")
    await Tenants(database).delete("acme", "op", ["base"])
    async with database.read() as connection:
        assert not (await connection.execute(saved_mixtures.saved_mixtures.select())).all()


async def test_parts_are_protected_unless_forced(catalog: Catalog, acme: Tenant):
    await add(catalog, acme, "a", 1, 2)
    await add(catalog, acme, "b", 3)
    await catalog.aliases.move(acme, "b", "prod", [AliasTarget(1)], "key")
    await catalog.mixtures.save(acme, "blend", "a@1*0.5+b:prod*0.5", "key")
    for name, version in (("a", 1), ("a", None), ("b", None)):
        with pytest.raises(AdapterInUse, match="saved mixture 'blend'"):
            await catalog.delete(acme, name, "key", version)
    with pytest.raises(AdapterInUse, match="saved mixture 'blend'"):
        await catalog.aliases.delete(acme, "b", "prod", "key")
    with pytest.raises(AdapterInUse, match="saved mixture 'blend'"):
        await catalog.versions.change(acme, "a", 1, {"state": "retired"}, "key")
    await catalog.delete(acme, "a", "key", 1, force=True)
    with pytest.raises(ModelNotFound, match="'a@1'"):
        await resolve_model(catalog, acme, "blend")
    await catalog.mixtures.delete(acme, "blend", "key")
    await catalog.aliases.delete(acme, "b", "prod", "key")
    await catalog.delete(acme, "b", "key")


async def test_a_name_is_never_both_and_a_part_never_vanishes(catalog: Catalog, acme: Tenant):
    """Race pushes, saves and deletions of the same names."""
    await add(catalog, acme, "a", 1)
    await add(catalog, acme, "b", 2)

    async def attempt(work: object) -> bool:
        try:
            await work  # type: ignore[misc]
        except (BadRequest, ModelNotFound, AdapterInUse, PreconditionRequired, RecordNotFound):
            return False
        return True

    for number in range(8):
        name, part = f"name-{number}", f"part-{number}"
        await add(catalog, acme, part, 10 + number)
        won = await asyncio.gather(
            attempt(catalog.mixtures.save(acme, name, "a*1+b*1", "key")),
            attempt(add(catalog, acme, name, 100 + number)),
            attempt(catalog.mixtures.save(acme, f"of-{number}", f"b*1+{part}*1", "key")),
            attempt(catalog.delete(acme, part, "key")),
            attempt(catalog.mixtures.save(acme, f"reverse-{number}", "b*1+a*1", "key")),
        )
        assert won[0] != won[1], "exactly one has the name"
        assert won[2] != won[3], "the part is deleted, or the mixture saved"
        assert won[4]
