"""Use of an adapter in the last day: by key, end user and version, among the tenant's newest requests."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from gateway.billing.writer import UsageWriter
from gateway.records.adapters import use as adapter_use
from gateway.records.adapters.use import AdapterUses, Use
from gateway.records.database import Database
from gateway.records.tenants.tenants import Tenant
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
