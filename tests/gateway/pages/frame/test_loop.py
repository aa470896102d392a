"""Pages and the event loop: none holds it for longer than 20 ms, not even at its first visit."""

import asyncio
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select

from gateway.pages.frame.frame import Compiled
from gateway.pages.widgets import tables
from gateway.process.background import running
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, audit, tenants

PAGES = {
    "/admin": (
        *("", "usage", "refusals", "requests", "tenants", "adapters", "engines", "fairness"),
        *("alerts", "audit", "settings", "playground"),
    ),
    "/console": ("", "usage", "requests", "keys", "adapters", "adapter-upload", "playground", "audit", "help"),
}
pytestmark = pytest.mark.usefixtures("no_garbage_collection")
# In s. 4,000 rows at once take 0.1 s and more.
MOST = 0.02


class Holds:
    """Longest CPU time of this thread between two iterations of the event loop, in s: other programs do not count."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            began = time.thread_time()
            # Without a pause: work that begins during a pause would not be measured.
            await asyncio.sleep(0)
            self.longest = max(self.longest, time.thread_time() - began)


@pytest.mark.parametrize("home", PAGES)
async def test_no_page_holds_the_event_loop(home: str, serve: Any, monkeypatch: pytest.MonkeyPatch):
    """Also on a first visit. Each is made three times, because a neighbour on the core may empty its caches once."""
    async with serve() as gateway:
        await gateway.tenant("acme")
        scopes = ["inference", "adapters", "usage", "keys"]
        key = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": scopes})).json["key"]
        holds = Holds()
        async with gateway.browser(*(() if home == "/admin" else (key, home))) as browser, running(holds.watch()):
            for path in PAGES[home]:
                found = []
                for _ in range(3):
                    monkeypatch.setattr(Compiled, "codes", {})
                    holds.longest = 0.0
                    assert (await browser.get(f"{home}/{path}")).status == 200, path
                    found.append(holds.longest)
                    assert not Compiled.codes, "the start has loaded all templates"
                assert min(found) < MOST, (path, found)


async def test_no_file_of_keys_holds_the_event_loop(serve: Any, tmp_path: Path):
    async with serve() as gateway:
        await gateway.tenant("acme")
        database = Database(f"sqlite:///{tmp_path}/gateway.db")
        async with database.write() as connection:
            key = (await connection.execute(select(api_keys).where(api_keys.c.tenant_id.is_not(None)))).one()._mapping
            copies = [{**key, "id": f"{i:016x}", "secret_hash": f"{i:064x}"} for i in range(2000)]
            await connection.execute(insert(api_keys), copies)
        await database.close()
        async with gateway.browser() as browser:
            found = []
            for _ in range(3):
                holds = Holds()
                async with running(holds.watch()):
                    got = await browser.get("/admin/keys?format=csv&tenant=acme")
                assert len(set(got.body.split(b"\r\n"))) == 2003
                found.append(holds.longest)
                if holds.longest < MOST:
                    break
            assert min(found) < MOST, found


async def fill(gateway: Any, tmp_path: Path) -> None:
    """Add 4,001 tenants and 1,001 keys."""
    await gateway.tenant("acme")
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    async with database.write() as connection:
        for table, number in ((tenants, 4000), (api_keys, 1000)):
            which = table.c.tenant_id.is_not(None) if table is api_keys else table.c.name == "acme"
            row = (await connection.execute(select(table).where(which))).one()._mapping
            own = "tenant_id" if table is api_keys else "name"
            copies = [{**row, "id": f"{i:016x}", own: f"{i:016x}"} for i in range(number)]
            if table is api_keys:
                copies = [{**copy, "secret_hash": f"{i:064x}"} for i, copy in enumerate(copies)]
            await connection.execute(insert(table), copies)
    await database.close()


async def test_no_page_of_many_rows_holds_the_event_loop(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A page of 1,000 rows takes 0.1 s to render, in a thread."""
    monkeypatch.setattr(tables, "ROWS", 1000)
    async with serve() as gateway:
        await fill(gateway, tmp_path)
        async with gateway.browser() as browser:
            for path in ("/admin/tenants", "/admin/keys"):
                found = []
                for _ in range(3):
                    holds = Holds()
                    async with running(holds.watch()):
                        page = await browser.get(path)
                    assert page.body.count(b"<tr>") > 1000, path
                    found.append(holds.longest)
                    if holds.longest < MOST:
                        break
                assert min(found) < MOST, (path, found)


async def test_no_list_of_keys_or_tenants_holds_the_event_loop(serve: Any, tmp_path: Path):
    async with serve() as gateway:
        await fill(gateway, tmp_path)
        dry_run = {"filter": {}, "suspended": True, "add_tags": ["eu"]}
        holds, found = Holds(), []
        async with running(holds.watch()):
            for method, path, options in (
                ("GET", "/admin/api/keys?all=true&limit=1000", {}),
                ("GET", "/admin/api/tenants?limit=1000", {}),
                ("POST", "/admin/api/tenants/bulk?dry_run=true", {"json": dry_run}),
            ):
                longest = []
                # The first call of a process compiles the statements, which takes up to 10 ms more.
                for _ in range(3):
                    await asyncio.sleep(0)  # the watch notes this test's own iteration, in which it decodes an answer
                    holds.longest = 0.0
                    answer = await gateway.admin.call(method, path, **options)
                    longest.append(holds.longest)
                assert min(longest) < MOST, (path, longest)
                found.append(answer.json)
        assert [len(each["data"]) for each in found] == [1000] * 3
        assert [each.get("total", each.get("count")) for each in found] == [1001, 4001, 4001]
        assert [each["tenant"] for each in found[2]["data"][:2]] == [f"{i:016x}" for i in range(2)]


async def test_no_file_of_the_audit_holds_the_event_loop(serve: Any, tmp_path: Path):
    async with serve() as gateway:
        await gateway.tenant("acme")
        key = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["keys"]})).json["key"]
        row = {"actor": "k", "action": "key.create", "target": "k", "tenant": "acme", "detail": "{}", "own": True}
        now = datetime.now(UTC)
        database = Database(f"sqlite:///{tmp_path}/gateway.db")
        async with database.write() as connection:
            await connection.execute(insert(audit), [{**row, "id": uuid.uuid4().hex, "at": now} for _ in range(4000)])
        await database.close()
        async with gateway.browser(key, "/console") as tenants, gateway.browser() as operators:
            for browser in (tenants, operators):
                path, found = f"{browser.home}/audit?format=csv&action=key.create", []
                for _ in range(3):
                    holds = Holds()
                    async with running(holds.watch()):
                        got = await browser.get(path)
                    assert (got.status, got.body.count(b"key.create")) == (200, 4002)
                    assert len(set(got.body.split(b"\r\n"))) == 4004
                    found.append(holds.longest)
                    if holds.longest < MOST:
                        break
                assert min(found) < MOST, (path, found)
