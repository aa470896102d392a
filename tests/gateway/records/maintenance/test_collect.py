"""`loraplex adapter collect` removes the adapters that no name refers to, and nothing else."""

import asyncio
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from adapters.open_store import open_store
from adapters.spool import PREFIX
from gateway.api import deployment_status
from gateway.errors import Unavailable
from gateway.records.adapters.catalog import Catalog
from gateway.records.maintenance import housekeeping
from gateway.records.maintenance.housekeeping import Housekeeping
from gateway.redis.client import connect
from gateway.redis.keys import HOUSEKEEPING_KEY
from testing.gateway.running import Gateway, change_database, until
from tests.gateway.api.adapters.test_adapters import files, push

COLLECT = "/admin/api/adapters/collect"


def stored(folder: Path) -> set[str]:
    return {path.name for path in (folder / "adapters").glob("??/*")}


async def make_old(folder: Path) -> None:
    """Set everything stored and removed so far to two hours ago."""
    for path in (folder / "adapters").glob("??/*"):
        os.utime(path, (time.time() - 7200,) * 2)
    await change_database(folder, "UPDATE removed_versions SET removed_at = datetime('now', '-2 hours')")


async def test_only_what_no_name_refers_to_for_an_hour_is_removed(gateway: Gateway, tmp_path: Path):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    kept, shared, freed, fresh = [(await push(acme, f"a{i}", files(i))).json["digest"][7:] for i in range(4)]
    assert (await push(globex, "same", files(1))).json["digest"][7:] == shared
    for name in ("a1", "a2"):
        assert (await acme.call("DELETE", f"/v1/adapters/{name}")).status == 200
    assert (await gateway.admin.post(COLLECT)).json == {"object": "collection", "removed": 0, "bytes": 0}
    await make_old(tmp_path)
    # Uploaded long ago, but removed just now: a request for it may still be on its way to an engine.
    assert (await push(acme, "late", files(4))).status == 201
    late = (await acme.get("/v1/adapters/late")).json["digest"][7:]
    await make_old(tmp_path)
    assert (await acme.call("DELETE", "/v1/adapters/late")).status == 200
    assert (await acme.call("DELETE", "/v1/adapters/a3")).status == 200
    assert (await push(acme, "again", files(3))).status == 201  # renews its time
    assert (await acme.call("DELETE", "/v1/adapters/again")).status == 200
    done = (await gateway.admin.post(COLLECT)).json
    assert done["removed"] == 1
    assert done["bytes"] > 1536
    assert stored(tmp_path) == {kept, shared, fresh, late}
    assert freed not in stored(tmp_path)
    assert not list((tmp_path / "adapters").glob(f"{PREFIX}*"))
    assert (await globex.chat(model="same")).status == 200
    assert (await acme.post(COLLECT)).status == 403
    assert (await gateway.admin.post(f"{COLLECT}?dry_run=true")).status == 200
    audit = (await gateway.admin.get("/admin/api/audit?action=adapter.collect")).json["data"]
    assert [(entry["actor"], entry["target"]) for entry in audit] == [("bootstrap", "store")] * 2


async def test_operators_see_what_waits_for_a_collection(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Content that another tenant's version has is not among it, nor is content that a collection has removed."""
    monkeypatch.setattr(deployment_status, "STORE_SECONDS", 0.0)

    async def removed() -> tuple[int, int, str]:
        found = (await gateway.admin.get("/admin/api/settings")).json["removed"]
        async with gateway.browser() as browser:
            page = (await browser.get("/admin/settings?tab=state")).body.decode()
        return found["contents"], found["num_bytes"], page.split("<dt>Removed adapters</dt><dd>")[1].split(",")[0]

    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    for i in range(3):
        assert (await push(acme, f"a{i}", files(i))).status == 201
    sizes = {each["name"]: each["size_bytes"] for each in (await acme.get("/v1/adapters")).json["data"]}
    assert (await push(globex, "same", files(1))).status == 201
    assert await removed() == (0, 0, "0 contents")
    for name in ("a0", "a1"):
        assert (await acme.call("DELETE", f"/v1/adapters/{name}")).status == 200
    assert await removed() == (1, sizes["a0"], "1 contents")
    assert (await globex.call("DELETE", "/v1/adapters/same")).status == 200
    assert await removed() == (2, sizes["a0"] + sizes["a1"], "2 contents")
    await make_old(tmp_path)
    assert (await gateway.admin.post(COLLECT)).json["removed"] == 2
    assert await removed() == (0, 0, "0 contents")


@pytest.mark.parametrize("fails", [False, True])
async def test_content_that_a_name_refers_to_at_the_second_check_stays(
    fails: bool, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Content that has a name at the second check stays: a version is added between the checks, or the check fails.

    Another gateway, which cleans the store, starts between the checks.
    """
    acme = await gateway.tenant("acme")
    assert (await push(acme, "a", files())).status == 201
    before = stored(tmp_path)
    await make_old(tmp_path)
    check, checks = Catalog.referenced, []

    async def referenced(self: Catalog, digests: Sequence[str], since: datetime) -> set[str]:
        checks.append(digests)
        if len(checks) == 1:
            return set()
        assert stored(tmp_path) == set()
        open_store(tmp_path / "adapters").clean()
        if fails:
            raise Unavailable("The database does not answer.", code="database_unavailable")
        return await check(self, digests, since)

    monkeypatch.setattr(Catalog, "referenced", referenced)
    assert (await gateway.admin.post(COLLECT)).status == (503 if fails else 200)
    assert len(checks) == 2
    assert stored(tmp_path) == before
    assert not list((tmp_path / "adapters").glob(f"{PREFIX}*"))
    assert (await acme.chat(model="a")).status == 200


async def test_a_deleted_tenants_adapters_go(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    assert (await push(acme, "a", files())).status == 201
    assert (await gateway.admin.call("DELETE", "/admin/api/tenants/acme")).status == 200
    await make_old(tmp_path)
    assert (await gateway.admin.post(COLLECT)).json["removed"] == 1
    assert stored(tmp_path) == set()


async def test_a_gateway_collects_by_itself(
    serve: Any, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(housekeeping, "ASK_SECONDS", 0.2)
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        digests = [(await push(acme, name, files(number))).json["digest"][7:] for number, name in enumerate("ab")]
        assert (await acme.call("DELETE", "/v1/adapters/a")).status == 200
        await make_old(tmp_path)
        redis = connect(redis_url, timeout=10.0)
        await redis.delete(HOUSEKEEPING_KEY)
        await redis.aclose()

        async def collected() -> bool:
            return stored(tmp_path) == set(digests[1:])

        await until(collected)


async def test_a_gateway_with_another_database_removes_only_that_databases_adapters_by_itself(
    serve: Any, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A wrong or empty database, such as before the restore of a lost one, knows none of the adapters in the store."""
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        lost = {(await push(acme, f"a{number}", files(number))).json["digest"][7:] for number in range(3)}
    monkeypatch.setattr(housekeeping, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(housekeeping, "EVERY_SECONDS", 0.1)
    redis = connect(redis_url, timeout=10.0)
    await redis.delete(HOUSEKEEPING_KEY)
    # `serve` copies an empty database over the former one.
    async with serve() as gateway:
        other = await gateway.tenant("other")
        own, unused = [(await push(other, f"own-{n}", files(n))).json["digest"][7:] for n in (8, 9)]
        assert (await other.call("DELETE", "/v1/adapters/own-9")).status == 200
        await make_old(tmp_path)
        assert unused in stored(tmp_path)
        caplog.clear()

        async def is_refused() -> bool:
            return sum("knows 1 of the 4 adapters" in record.message for record in caplog.records) >= 2

        await until(is_refused)
        assert stored(tmp_path) == {*lost, own}
        assert "loraplex adapter collect" in caplog.text
        # The operator knows better.
        assert (await gateway.admin.post(f"{COLLECT}?dry_run=true")).json["removed"] == 3
        assert (await gateway.admin.post(COLLECT)).json["removed"] == 3
        assert stored(tmp_path) == {own}
    await redis.delete(HOUSEKEEPING_KEY)
    await redis.aclose()


async def test_deletions_that_the_database_remembers_are_collected_whatever_their_share(
    serve: Any, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(housekeeping, "ASK_SECONDS", 0.2)
    redis = connect(redis_url, timeout=10.0)
    await redis.delete(HOUSEKEEPING_KEY)
    async with serve() as gateway:
        acme, gone = await gateway.tenant("acme"), await gateway.tenant("gone")
        for number in range(4):
            assert (await push(acme, f"a{number}", files(number))).status == 201
        for number in range(4, 20):
            assert (await push(gone, f"b{number}", files(number))).status == 201
        for number in range(4):
            assert (await acme.call("DELETE", f"/v1/adapters/a{number}")).status == 200
        assert (await gateway.admin.call("DELETE", "/admin/api/tenants/gone")).status == 200
        await make_old(tmp_path)
        await redis.delete(HOUSEKEEPING_KEY)

        async def is_empty() -> bool:
            return not stored(tmp_path)

        await until(is_empty)
    await redis.delete(HOUSEKEEPING_KEY)
    await redis.aclose()


async def test_one_process_of_all_does_the_chores(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    """Three processes in two turns run each chore once per turn, and a failing chore stops no other."""
    monkeypatch.setattr(housekeeping, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(housekeeping, "EVERY_SECONDS", 1.0)
    redis = connect(redis_url, timeout=10.0)
    await redis.delete(HOUSEKEEPING_KEY)
    done: list[int] = []

    async def fail() -> None:
        raise ValueError("a chore fails")

    def process(number: int) -> Housekeeping:
        async def collect() -> None:
            done.append(number)

        return Housekeeping(redis, 10.0, {"fail": fail, "collect": collect})

    started = time.monotonic()
    tasks = [asyncio.create_task(process(number).run()) for number in range(3)]

    async def twice() -> bool:
        return len(done) >= 2

    await until(twice)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert time.monotonic() - started >= 1.0
    assert len(done) == 2
    await redis.delete(HOUSEKEEPING_KEY)
    await redis.aclose()
