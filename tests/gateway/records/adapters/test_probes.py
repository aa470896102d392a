"""Probes of versions in SQL, on SQLite and PostgreSQL."""

import msgspec
import pytest
from sqlalchemy import func, select

from gateway.errors import RecordNotFound
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.pins import pinned_bases
from gateway.records.adapters.probes import PER_TENANT, Probes, Unprobed
from gateway.records.bases.base import Binding
from gateway.records.caches.changes import Changes
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_probes
from gateway.records.tenants.tenants import Tenants
from testing.gateway.bases import only
from wire.probes import AdapterProbe, ProbeReason

DIGEST = "a" * 64


def probe(base: str = "b" * 64, rank: int = 8) -> AdapterProbe:
    sizes = {"num_modules": 2, "host_bytes": 1, "device_bytes": 2, "device_pages": 1}
    return AdapterProbe(digest=f"sha256:{DIGEST}", reasons=(), rank=rank, base_digest=base, **sizes)


async def test_probes_live_as_long_as_their_version(database: Database):
    probes, catalog, tenants = Probes(database), Catalog(database, only()), Tenants(database)
    acme = await tenants.create("acme", {}, "op")
    globex = await tenants.create("globex", {}, "op")
    content = {"digest": DIGEST, "rank": 8, "num_bytes": 1, "actor": "key", "state": "validating"}
    for _ in range(PER_TENANT + 1):
        await catalog.add_version(acme, "pirate", **content)
    await catalog.add_version(globex, "poet", **content)
    missing = await probes.missing()
    assert len([each for each in missing if each.tenant_name == "acme"]) == PER_TENANT
    assert Unprobed("globex", "poet", 1, DIGEST, "") in missing, "no tenant is behind another's many versions"

    with pytest.raises(RecordNotFound, match="has not been probed"):
        await probes.get(acme, "pirate", 1)
    await probes.record(acme, "pirate", 1, probe(rank=4))
    await probes.record(acme, "pirate", 1, probe(rank=8))
    await probes.record(acme, "pirate", 99, probe())
    assert await probes.record(acme, "pirate", 1, probe(base="d" * 64))
    faulty = msgspec.structs.replace(
        probe(base="e" * 64), reasons=(ProbeReason(code="adapter_not_finite", message="m"),)
    )
    assert not await probes.record(acme, "pirate", 1, faulty)
    weights = {each.base_digest for each in await probes.bound()}
    assert weights == {"d" * 64, None}, "faults do not bind, and versions without a probe are listed"
    found = await probes.get(acme, "pirate", 1)
    assert (found.probe.base_digest, found.base_digest) == ("e" * 64, "d" * 64)
    assert await probes.record(acme, "pirate", 1, probe())
    assert (await probes.get(acme, "pirate", 1))[1].rank == 8
    for tenant, name, version in ((globex, "pirate", 1), (acme, "pirate", 99), (acme, "../x", 1)):
        with pytest.raises(RecordNotFound):
            await probes.get(tenant, name, version)

    await catalog.versions.set_state(acme, "pirate", 1, "ready", "probe")
    await probes.record(acme, "pirate", 2, probe(base="c" * 64))
    found = [each for each in await probes.bound() if each.base_digest is not None]
    bound = [(each.base_digest[0], each.tenant, each.name, each.version, each.state) for each in found]
    assert bound == [("b", "acme", "pirate", 1, "ready"), ("c", "acme", "pirate", 2, "validating")]
    await catalog.versions.set_state(acme, "pirate", 2, "rejected", "probe")
    assert [each.version for each in await probes.bound() if each.base_digest is not None] == [1]

    await catalog.versions.delete(acme, "pirate", None, "key", force=True)
    await tenants.delete("globex", "op", ["base"])
    async with database.read() as connection:
        assert (await connection.execute(select(func.count()).select_from(adapter_probes))).scalar_one() == 0
    assert await probes.missing() == []


async def test_each_binding_is_announced_as_a_change(database: Database):
    probes, catalog = Probes(database), Catalog(database, only())
    acme = await Tenants(database).create("acme", {}, "op")
    await catalog.add_version(acme, "pirate", digest=DIGEST, rank=8, num_bytes=1, actor="key", state="validating")
    changes = Changes(database)
    await changes.read()
    announced = []
    for made in (probe(), probe(), probe(base="d" * 64)):
        mark = changes.mark
        await probes.record(acme, "pirate", 1, made)
        await changes.read()
        announced.append(not changes.is_unchanged(mark, acme.id))
    assert announced == [True, False, True]


async def test_pinned_versions_with_their_bases(database: Database):
    probes, catalog, tenants = Probes(database), Catalog(database, only()), Tenants(database)
    for name, base in (("acme", "b" * 64), ("globex", "d" * 64), ("hooli", None)):
        tenant = await tenants.create(name, {}, "op")
        for digest in (DIGEST, "e" * 64):
            await catalog.add_version(tenant, "pirate", digest=digest, rank=8, num_bytes=1, actor="key")
        await catalog.versions.change(tenant, "pirate", 1, {"pinned": True}, "op")
        if base is not None:
            await probes.record(tenant, "pirate", 1, probe(base))
    found = await pinned_bases(database)
    assert {digest: set(each) for digest, each in found.items()} == {
        DIGEST: {Binding.of(None, base) for base in ("b" * 64, "d" * 64, None)}
    }
