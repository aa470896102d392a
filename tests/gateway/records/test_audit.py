"""The audit: every change with its author, time and address, and no secret."""

import asyncio
import csv
import json
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import update

from gateway.records import audit
from gateway.records.audit import Audit, record_change
from gateway.records.keys.keys import ApiKey, Keys
from gateway.records.sql.database import Database
from gateway.records.sql.tables import audit as table
from gateway.records.tenants.tenants import Tenants
from loraplex.cli import main
from testing.gateway.running import ADMIN_KEY, Client, Gateway

NOW = datetime.now(UTC)


async def entries(client: Client, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get("/admin/api/audit", params=query)
    assert answer.status == 200, answer.body
    return answer.json["data"]


async def test_changes_are_told_with_their_request(gateway: Gateway):
    before = datetime.now(UTC) - timedelta(seconds=1)
    acme = await gateway.tenant("acme", weight=2.0)
    key_id = (acme.key or "").split("_")[1]
    await gateway.tenant("other")
    operator = gateway.client((await gateway.admin.post("/admin/api/keys", {"label": "ops"})).json["key"])
    revoked = await operator.call("DELETE", f"/admin/api/keys/{key_id}")
    assert revoked.status == 200

    last, *older = await entries(gateway.admin)
    assert {name: last[name] for name in ("action", "target", "tenant", "address", "request_id", "actor")} == {
        "action": "key.revoke",
        "target": key_id,
        "tenant": "acme",
        "address": "127.0.0.1",
        "request_id": revoked.headers["x-request-id"],
        "actor": (operator.key or "").split("_")[1],
    }
    assert [entry["action"] for entry in older] == [
        "key.create", "key.create", "tenant.create", "key.create", "tenant.create",
    ]  # fmt: skip
    assert {entry["actor"] for entry in older} == {"bootstrap"}
    assert older[-1]["detail"]["weight"] == 2.0
    shown = json.dumps([last, *older])
    for key in (acme.key, operator.key, ADMIN_KEY):
        assert (key or "").split("_")[-1] not in shown

    of_acme = await entries(gateway.admin, tenant="acme")
    assert [entry["action"] for entry in of_acme] == ["key.revoke", "key.create", "tenant.create"]
    assert [e["target"] for e in await entries(gateway.admin, action="tenant")] == ["other", "acme"]
    assert [e["target"] for e in await entries(gateway.admin, action="key.revoke")] == [key_id]
    assert await entries(gateway.admin, action="tenan") == []
    assert len(await entries(gateway.admin, actor=last["actor"])) == 1
    assert len(await entries(gateway.admin, since=before.isoformat())) == 6
    assert await entries(gateway.admin, until=before.isoformat()) == []


async def test_pages_follow_each_other(database: Database):
    async with database.write() as connection:
        for number in range(7):
            await record_change(connection, "op", "tenant.update", f"t{number}")
    audit, seen, after = Audit(database), [], None
    for size in (3, 3, 1):
        page, has_more = await audit.list(limit=3, after=after)
        assert (len(page), has_more) == (size, size == 3)
        seen += [entry.target for entry in page]
        after = page[-1].id
    # All have the same time stamp: any order, each once.
    assert sorted(seen) == [f"t{number}" for number in range(7)]
    assert await audit.list(after=after) == ([], False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"after": "nobody"}, "after"),
        ({"since": "yesterday"}, "since"),
        ({"tenant": "\x00"}, "tenant"),
    ],
)
async def test_a_question_that_is_none(query: dict[str, str], param: str, gateway: Gateway):
    answer = await gateway.admin.get("/admin/api/audit", params=query)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_only_operators_may_read_it(gateway: Gateway):
    acme = await gateway.tenant("acme")
    assert (await acme.get("/admin/api/audit")).status == 403
    assert (await gateway.nobody.get("/admin/api/audit")).status == 401


async def test_a_tenants_own_changes_are_bounded(database: Database, monkeypatch: pytest.MonkeyPatch):
    """A tenant's changes are bounded by age or number; they remove no other tenant's entry, and no operator's."""
    monkeypatch.setattr(audit, "OWN_ENTRIES", 5)
    monkeypatch.setattr(audit, "SWEPT_AT_ONCE", 2)
    tenants, keys, log = Tenants(database), Keys(database), Audit(database)
    own = {"busy": "b", "quiet": "q"}
    owners = {key_id: await tenants.create(name, {}, "op") for name, key_id in own.items()}
    key = {"label": "", "scopes": frozenset({"adapters"}), "secret_hash": "x", "created_at": NOW}
    for key_id, tenant in (*owners.items(), ("operator", None)):
        await keys.add(ApiKey(id=key_id, tenant=tenant, **key), "op")
    async with database.write() as connection:
        for i in range(12):
            await record_change(connection, own["busy"], "adapter.push", f"busy/{i}", tenant="busy")
            await record_change(connection, "operator", "adapter.push", f"busy/op{i}", tenant="busy")
        for i in range(3):
            await record_change(connection, own["quiet"], "adapter.push", f"quiet/{i}", tenant="quiet")
        old = update(table).where(table.c.target.in_(["quiet/0", "busy/op0"]))
        await connection.execute(old.values(at=NOW - timedelta(days=3)))
    entries, _ = await log.list(action="adapter", limit=100)
    assert {(entry.actor == "operator", entry.own) for entry in entries} == {(True, False), (False, True)}
    assert await log.sweep(timedelta(days=2)) == 7 + 1
    assert await log.sweep(timedelta(days=2)) == 0
    left, _ = await log.list(action="adapter", limit=100)
    assert {entry.target for entry in left} == {
        *(f"busy/{i}" for i in range(7, 12)),
        *(f"busy/op{i}" for i in range(12)),
        *("quiet/1", "quiet/2"),
    }
    assert len((await log.list(action="key"))[0]) == 3


async def test_the_command(gateway: Gateway):
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env = clean | {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}

    async def run(*arguments: str) -> Result:
        result = await asyncio.to_thread(CliRunner().invoke, main, ("audit", *arguments), env=env)
        assert result.exit_code == 0, result.output
        return result

    await gateway.tenant("acme")
    first = await run("--limit", "1", "--since", "1h")
    head, row = first.stdout.splitlines()
    assert head.split() == ["CHANGED_AT", "ACTION", "TENANT", "TARGET", "ACTOR", "ADDRESS", "REQUEST", "DETAIL"]
    assert row.split()[1] == "key.create"
    assert row.split()[2] == "acme"
    assert row.split()[4:6] == ["bootstrap", "127.0.0.1"]
    [reported] = await entries(gateway.admin, limit=1)
    assert reported["request_id"].endswith(row.split()[6])
    for name in reported["detail"]:
        assert f"{name}=" in row
    [written] = csv.DictReader((await run("--limit", "1", "--csv")).stdout.splitlines())
    assert {**written, "detail": json.loads(written["detail"])} == {n: v or "" for n, v in reported.items()} | {
        "detail": reported["detail"],
        "own": "false",
    }
    assert "key." not in (await run("--not-action", "key,tenant.delete")).stdout
    await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"budget_per_month": 50_000_000})
    await gateway.admin.call(
        "PATCH", "/admin/api/tenants/acme", json={"budget_per_month": 75_500_000, "suspended": True}
    )
    changed, suspended = (await run("--limit", "2")).stdout.splitlines()[1:]
    assert changed.endswith(" budget_per_month=50.00 -> 75.50")
    assert suspended.split()[1:4] == ["tenant.suspend", "acme", "acme"]
    after = first.stderr.split("--after ")[1].strip()
    [older] = json.loads((await run("--after", after, "--tenant", "acme", "--json")).stdout)["data"]
    assert (older["action"], older["target"]) == ("tenant.create", "acme")
