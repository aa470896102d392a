"""Rankings of usage: the greatest groups are found among the greatest tenants, and while charts are rebuilt."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete

from gateway.billing.usage_row import UsageRow
from gateway.billing.writer import UsageWriter
from gateway.records.activity.tables import ACTIVITY
from gateway.records.database import Database
from gateway.records.money import usage_ranking
from gateway.records.money.usage_ranking import GroupBy, Part, UsageRanking
from gateway.records.money.usage_rows import UsageFilter
from testing.gateway.rows import row

NOW = datetime.now(UTC)
PART = Part(which=UsageFilter(), since=NOW - timedelta(days=10), until=None)


def rows() -> list[UsageRow]:
    """Return usage of 12 tenants. t11 is the greatest by many small models, t0 has the greatest model."""
    found = []
    for i in range(12):
        costs = [300] if i == 0 else [200 - i] if i < 6 else [7 * i + j for j in range(i)]
        for j, cost in enumerate(costs):
            owner = {"tenant_id": f"t{i}", "tenant": f"n{i}", "model": f"m{j}", "adapter_digest": "d"}
            found.append(row(f"{i}-{j}", **owner, created_at=NOW - timedelta(days=(i + j) % 9), cost=cost))
    return found


def expected(group_by: GroupBy) -> list[tuple[Any, int]]:
    sums: dict[Any, int] = {}
    for each in rows():
        key = (each.tenant, each.model) if group_by == "model" else (each.tenant,)
        sums[key] = sums.get(key, 0) + each.cost
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))


async def found(ranking: UsageRanking, group_by: GroupBy, offset: int, limit: int) -> list[tuple[Any, int]]:
    page = await ranking.groups(PART, group_by, "cost", offset=offset, limit=limit)
    assert (await ranking.total(PART))["cost"] == sum(each.cost for each in rows())
    names = ("tenant", "model") if group_by == "model" else ("tenant",)
    return [(tuple(getattr(group, name) for name in names), group.cost) for group in page.groups]


@pytest.mark.parametrize("most", [1, 3, 50])
@pytest.mark.parametrize("is_rebuilt", [True, False])
async def test_a_page_has_the_greatest_groups_of_all_tenants(
    database: Database, monkeypatch: pytest.MonkeyPatch, most: int, is_rebuilt: bool
):
    monkeypatch.setattr(usage_ranking, "FIRST_TENANTS", most)
    await UsageWriter(database).write(rows())
    if not is_rebuilt:
        async with database.write() as connection:
            for table in ACTIVITY.values():
                await connection.execute(delete(table))
    ranking = UsageRanking(database)
    for group_by in ("model", "key", "tenant"):
        whole = expected(group_by)
        for offset in (0, 4, len(whole) - 2):
            assert await found(ranking, group_by, offset, 5) == whole[offset : offset + 5], (group_by, offset)


@pytest.mark.parametrize(("first", "numbers"), [(9, [9]), (3, [3, 12])])
async def test_only_the_tenants_that_can_be_on_the_page_are_read(
    database: Database, monkeypatch: pytest.MonkeyPatch, first: int, numbers: list[int]
):
    monkeypatch.setattr(usage_ranking, "FIRST_TENANTS", first)
    await UsageWriter(database).write(rows())
    read: list[Any] = []
    found_of = UsageRanking._found

    async def watched(self: UsageRanking, part: Part, window: Any) -> Any:
        read.append(part.which.tenant_ids)
        return await found_of(self, part, window)

    monkeypatch.setattr(UsageRanking, "_found", watched)
    page = await UsageRanking(database).groups(PART, "model", "cost", limit=2)
    assert [group.cost for group in page.groups] == [300, 199]
    assert page.has_more
    assert page.number is None
    assert [len(ids) for ids in read] == numbers
