"""Use of an adapter in the last day: by key, end user and version, among the tenant's newest requests."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import event, text

from gateway.billing.writer import UsageWriter
from gateway.records.adapters import use as adapter_use
from gateway.records.adapters.use import AdapterUses, Use
from gateway.records.audit import record_change
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.rows import row


def numbers(uses: list[Use]) -> list[tuple[str, int, int]]:
    return [(use.name, use.requests, use.cost) for use in uses]


@pytest.mark.parametrize("scanned", [7, 20, 40, 41])
async def test_users_and_versions_are_those_of_the_newest_requests(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch, scanned: int
):
    monkeypatch.setattr(adapter_use, "SCANNED", scanned)
    now = datetime.now(UTC)
    used = [
        row(
            f"r{i}",
            tenant_id=acme.id if i % 5 else "other",
            model=("pirate", "terse")[i % 3 == 1],
            end_user=(None, "ann", "bob")[i % 4 % 3],
            version=i % 2 + 9 if i % 7 else None,
            created_at=now - timedelta(minutes=20 * i),
            cost=2**i,
        )
        for i in range(50)
    ]
    old = [row("old", tenant_id=acme.id, model="pirate", end_user="old", created_at=now - timedelta(hours=25))]
    await UsageWriter(database).write([*used, *old])
    newest = [each for each in used if each.tenant_id == acme.id][:scanned]
    found = await AdapterUses(database).of(acme, "pirate")
    for uses, name in ((found.users, "end_user"), (found.versions, "version")):
        values = Counter(str(value) for each in newest if each.model == "pirate" and (value := getattr(each, name)))
        costs = Counter[str]()
        for each in newest:
            if each.model == "pirate" and getattr(each, name):
                costs[str(getattr(each, name))] += each.cost
        expected = [(value, number, costs[value]) for value, number in values.items()]
        assert numbers(uses) == sorted(expected, key=lambda use: (-use[1], int(use[0]) if use[0].isdigit() else use[0]))
    assert found.is_partial == (scanned <= 40)


async def test_changes_are_found_however_many_other_tenants_make(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter_use, "SCANNED", 10)
    mallory = await Tenants(database).create("mallory", {}, "op")
    own = [("adapter.push", "acme/pirate@1"), ("adapter.move", "acme/pirate:prod"), ("adapter.delete", "acme/pirate")]
    others = [("adapter.push", "acme/pirates@1"), ("adapter.push", "acme/pir%te"), ("key.create", "acme/pirate")]
    async with database.write() as connection:
        for action, target in own + others:
            await record_change(connection, "op", action, target, tenant="acme")
        for number in range(50):
            await record_change(connection, "op", "adapter.push", f"mallory/pirate@{number}", tenant="mallory")
    uses = AdapterUses(database)
    assert [(each.action, each.target) for each in await uses.changes(acme, "pirate")] == own[::-1]
    assert [each.target for each in await uses.changes(mallory, "pirate")] == [
        f"mallory/pirate@{number}" for number in range(49, 39, -1)
    ]
    # A later tenant of the same name has none of them.
    later = msgspec.structs.replace(acme, created_at=datetime.now(UTC))
    assert await uses.changes(later, "pirate") == []


async def test_changes_are_read_along_an_index_of_the_tenant(database: Database, acme: Tenant):
    """Entries of other tenants thus cost nothing."""
    asked: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    engine = database._engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    await AdapterUses(database).changes(acme, "pirate")
    event.remove(engine, "before_cursor_execute", note)
    [(statement, parameters)] = [each for each in asked if "FROM audit" in each[0]]
    async with database.read() as connection:
        if database.dialect == "postgresql":
            # The table is too small for an index to be worth it.
            await connection.execute(text("SET LOCAL enable_seqscan = off"))
        explain = {"sqlite": "EXPLAIN QUERY PLAN", "postgresql": "EXPLAIN"}[database.dialect]
        plan = (await connection.exec_driver_sql(f"{explain} {statement}", parameters)).all()
    assert "ix_audit_tenant_at" in str(plan), plan
