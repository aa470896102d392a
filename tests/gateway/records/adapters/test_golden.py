"""Golden answers of versions in SQL, on SQLite and PostgreSQL."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from gateway.errors import AdapterLimitExceeded, RecordNotFound
from gateway.records.adapters import golden
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.golden import Difference, Golden, GoldenAnswer, GoldenCheck, GoldenPrompt
from gateway.records.adapters.probes import Probes
from gateway.records.adapters.rows import lock_known_name
from gateway.records.bases.base import EngineSoftware
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions, golden_answers, golden_checks
from gateway.records.tenants.tenants import Tenants
from testing.gateway.bases import only
from wire.probes import AdapterProbe

DIGEST = "a" * 64
PROMPTS = (GoldenPrompt(max_tokens=4, prompt="Hi\nthere"),)
START = ("", 0)


def software(version: str = "1.0", base: str = "b" * 64) -> EngineSoftware:
    return EngineSoftware(kind="loraplex", version=version, base_digest=base)


def answers(of: EngineSoftware) -> tuple[GoldenAnswer, ...]:
    return (GoldenAnswer(text="Ahoy", software=of),)


def check(of: EngineSoftware, seconds: int = 0, *differences: Difference) -> GoldenCheck:
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    return GoldenCheck(software=of, differences=differences, checked_at=at)


async def test_golden_answers_live_as_long_as_their_version(database: Database, monkeypatch: pytest.MonkeyPatch):
    own, catalog, tenants = Golden(database), Catalog(database, only()), Tenants(database)
    acme = await tenants.create("acme", {}, "op")
    globex = await tenants.create("globex", {}, "op")
    content: dict[str, Any] = {"rank": 8, "num_bytes": 1, "actor": "key"}
    for number in range(3):
        await catalog.add_version(acme, "pirate", digest=f"{number}" * 64, **content)
    with pytest.raises(RecordNotFound, match="no golden answers"):
        await own.get(acme, "pirate", 1)
    made = await own.put(acme, "pirate", 1, PROMPTS, answers(software()), "key")
    assert await own.get(acme, "pirate", 1) == made
    for tenant, name, version in ((globex, "pirate", 1), (acme, "pirate", 99), (acme, "../x", 1)):
        with pytest.raises(RecordNotFound):
            await own.get(tenant, name, version)
        with pytest.raises(RecordNotFound):
            await own.delete(tenant, name, version, "key")
        with pytest.raises(RecordNotFound):
            await own.put(tenant, name, version, PROMPTS, answers(software()), "key")

    # A check belongs to the set that it asked.
    new = software("1.1")
    different = check(new, 1, Difference(prompt=0, position=2, agreement=0.5, text="Ah!"))
    await own.record(acme, "pirate", 1, "another", different)
    assert (await own.get(acme, "pirate", 1)).checks == made.checks
    await own.record(acme, "pirate", 1, made.tag, different)
    assert (await own.get(acme, "pirate", 1)).checks == (different, *made.checks)
    await own.record(acme, "pirate", 1, made.tag, check(new, 2))
    assert [each.differences for each in (await own.get(acme, "pirate", 1)).checks] == [(), ()]
    monkeypatch.setattr(golden, "KEPT_CHECKS", 2)
    await own.record(acme, "pirate", 1, made.tag, check(software("1.2"), 3))
    assert [each.software.version for each in (await own.get(acme, "pirate", 1)).checks] == ["1.2", "1.1"]

    monkeypatch.setattr(golden, "MAX_SETS", 2)
    await own.put(acme, "pirate", 2, PROMPTS, answers(software()), "key")
    await own.put(acme, "pirate", 2, PROMPTS, answers(software()), "key")
    with pytest.raises(AdapterLimitExceeded, match="of 2 versions"):
        await own.put(acme, "pirate", 3, PROMPTS, answers(software()), "key")
    await own.check_room(acme, "pirate", 2)
    with pytest.raises(AdapterLimitExceeded):
        await own.check_room(acme, "pirate", 3)
    await own.delete(acme, "pirate", 2, "key")
    await own.put(acme, "pirate", 3, PROMPTS, answers(software()), "key")

    await catalog.versions.delete(acme, "pirate", 1, "key", force=True)
    await tenants.delete("acme", "op", ["base"])
    async with database.read() as connection:
        for table in (golden_answers, golden_checks):
            assert (await connection.execute(select(func.count()).select_from(table))).scalar_one() == 0


async def test_a_check_of_a_set_that_is_replaced_meanwhile_is_not_recorded(database: Database):
    own, catalog = Golden(database), Catalog(database, only())
    acme = await Tenants(database).create("acme", {}, "op")
    await catalog.add_version(acme, "pirate", digest=DIGEST, rank=8, num_bytes=1, actor="key")
    made = await own.put(acme, "pirate", 1, PROMPTS, answers(software()), "key")
    async with database.write() as connection:
        await lock_known_name(connection, acme.id, "pirate")
        late = asyncio.create_task(own.record(acme, "pirate", 1, made.tag, check(software("1.1"), 1)))
        # The check waits for the lock of the name.
        await asyncio.sleep(0.3)
        await connection.execute(update(golden_answers).values(tag="another"))
    await late
    assert (await own.get(acme, "pirate", 1)).checks == made.checks


async def test_versions_without_a_check_under_a_software(database: Database):
    own, catalog, tenants = Golden(database), Catalog(database, only()), Tenants(database)
    acme = await tenants.create("acme", {}, "op")
    globex = await tenants.create("globex", {}, "op")
    for tenant, name in ((acme, "pirate"), (acme, "poet"), (globex, "clerk")):
        await catalog.add_version(tenant, name, digest=DIGEST, rank=8, num_bytes=1, actor="key")
        await own.put(tenant, name, 1, PROMPTS, answers(software()), "key")

    async def found(of: EngineSoftware) -> set[tuple[str, str]]:
        names, place = set(), START
        while (each := await own.unchecked(of, "", place)) is not None:
            names.add((each.tenant_name, each.name))
            assert each.place > place
            place = each.place
        return names

    assert await found(software()) == set()
    new = software("1.1")
    assert await found(new) == {("acme", "pirate"), ("acme", "poet"), ("globex", "clerk")}
    await own.record(acme, "poet", 1, (await own.get(acme, "poet", 1)).tag, check(new))
    sizes = {"rank": 8, "num_modules": 2, "host_bytes": 1, "device_bytes": 2, "device_pages": 1}
    bound = AdapterProbe(digest=DIGEST, reasons=(), base_digest="c" * 64, **sizes)
    await Probes(database).record(acme, "pirate", 1, bound)
    assert await found(new) == {("globex", "clerk")}, "a version stays on its base model"
    assert await found(software("1.1", "c" * 64)) == {("acme", "pirate"), ("acme", "poet"), ("globex", "clerk")}
    await tenants.update("globex", {"suspended": True}, "op")
    await catalog.versions.change(acme, "poet", 1, {"state": "retired"}, "key", force=True)
    assert await found(software("1.2", "")) == {("acme", "pirate")}
    async with database.write() as connection:
        await connection.execute(update(adapter_versions).values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    assert await found(software("1.2", "")) == set(), "an expired version is not served"
