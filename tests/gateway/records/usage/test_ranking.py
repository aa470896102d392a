"""Rankings of usage: the greatest groups are found among the greatest tenants, and while charts are rebuilt."""

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete

from gateway.billing.writer import UsageWriter
from gateway.records.activity.tables import ACTIVITY
from gateway.records.sql.database import Database
from gateway.records.usage import ranking as usage_ranking
from gateway.records.usage.ranked_groups import CURVES, GroupBy, Measure, Part, RankedGroup
from gateway.records.usage.ranking import UsageRanking
from gateway.records.usage.rows import UsageFilter
from gateway.records.usage.steps import by_day, total_of
from gateway.usage_row import UsageRow
from testing.gateway.rows import row

NOW = datetime.now(UTC)
PART = Part(criteria=UsageFilter(), since=NOW - timedelta(days=10), until=None)


def rows() -> list[UsageRow]:
    """Return usage of 12 tenants. t11 is the greatest by many small models, t0 has the greatest model."""
    found = []
    for i in range(12):
        costs = [300] if i == 0 else [200 - i] if i < 6 else [7 * i + j for j in range(i)]
        for j, cost in enumerate(costs):
            owner = {"tenant_id": f"t{i:x}", "tenant": f"n{i:x}", "model": f"m{j}", "adapter_digest": "d"}
            found.append(row(f"{i}-{j}", **owner, created_at=NOW - timedelta(days=(i + j) % 9), cost=cost))
    return found


async def write(database: Database, used: list[UsageRow], *, is_rebuilt: bool) -> None:
    """Write usage. is_rebuilt: False leaves the sums for charts empty, as after an update."""
    await UsageWriter(database).write(used)
    if not is_rebuilt:
        async with database.write() as connection:
            for table in ACTIVITY.values():
                await connection.execute(delete(table))


def expected(group_by: GroupBy, measure: Measure) -> list[tuple[Any, int]]:
    sums: dict[Any, int] = {}
    for each in rows():
        key = (each.tenant, each.model) if group_by == "model" else (each.tenant,)
        sums[key] = sums.get(key, 0) + (each.cost if measure == "cost" else 1)
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))


def shown(groups: Sequence[RankedGroup], group_by: GroupBy, measure: Measure) -> list[tuple[Any, int]]:
    names = ("tenant", "model") if group_by == "model" else ("tenant",)
    return [(tuple(getattr(group, name) for name in names), getattr(group, measure)) for group in groups]


@pytest.mark.parametrize("most", [1, 3, 50])
@pytest.mark.parametrize("is_rebuilt", [True, False])
async def test_a_page_has_the_greatest_groups_of_all_tenants(
    database: Database, monkeypatch: pytest.MonkeyPatch, most: int, is_rebuilt: bool
):
    monkeypatch.setattr(usage_ranking, "FIRST_TENANTS", most)
    await write(database, rows(), is_rebuilt=is_rebuilt)
    ranking = UsageRanking(database)
    assert (await ranking.total(PART))["cost"] == sum(each.cost for each in rows())
    for group_by, measure in itertools.product(("model", "key", "tenant"), ("cost", "requests")):
        whole = expected(group_by, measure)
        for offset in (0, 4, len(whole) - 2):
            page = await ranking.groups(PART, group_by, measure, offset=offset, limit=5)
            assert shown(page.groups, group_by, measure) == whole[offset : offset + 5], (group_by, measure, offset)
            if page.first is not None:
                first = min(CURVES, offset + 6)
                assert shown(page.first, group_by, measure) == whole[:first], (group_by, measure, offset)
            assert (page.first is None) == (offset > 0 and (group_by == "tenant" or not is_rebuilt))


@pytest.mark.parametrize(
    ("group_by", "costs", "first", "numbers"),
    [("model", [300, 199], 9, [5, 4]), ("model", [300, 199], 3, [2, 1, 5, 4]), ("key", [902, 745], 1, [1, 1, 1])],
)
async def test_only_the_tenants_that_can_be_on_the_page_are_read(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    group_by: GroupBy,
    costs: list[int],
    first: int,
    numbers: list[int],
):
    monkeypatch.setattr(usage_ranking, "FIRST_TENANTS", first)
    await UsageWriter(database).write(rows())
    read: list[Any] = []
    found_of = UsageRanking._found

    async def watched(self: UsageRanking, part: Part, *others: Any) -> Any:
        read.append(part.criteria.tenant_ids)
        return await found_of(self, part, *others)

    monkeypatch.setattr(UsageRanking, "_found", watched)
    page = await UsageRanking(database).groups(PART, group_by, "cost", limit=2)
    assert [group.cost for group in page.groups] == costs
    assert page.has_more
    assert page.number is None
    # Two halves are read at a time.
    assert [len(ids) for ids in read] == numbers
    assert len({each for ids in read for each in ids}) == sum(numbers)


@pytest.mark.parametrize("is_rebuilt", [True, False])
@pytest.mark.parametrize("models", [["base"], ["base", "m1"], ["m1"]])
async def test_sums_of_models_are_those_of_their_rows(database: Database, models: list[str], is_rebuilt: bool):
    """The third tenant has an adapter of the base model's name."""
    digests = {("n2", "base"): "d", ("n0", "m1"): "d", ("n1", "m1"): "d"}
    owned = [(tenant, model) for tenant in ("n0", "n1", "n2") for model in ("base", "m1", "m2")]
    used = [
        row(
            f"{i}-{tenant}-{model}",
            **{"tenant_id": f"t{tenant}", "tenant": tenant, "model": model, "cost": 3**j + i},
            adapter_digest=digests.get((tenant, model)),
            created_at=NOW - timedelta(days=3 * i),
        )
        for i in range(3)
        for j, (tenant, model) in enumerate(owned)
    ]
    await write(database, used, is_rebuilt=is_rebuilt)
    ranking, part = UsageRanking(database), msgspec.structs.replace(PART, criteria=UsageFilter(models=models))
    kept = [each for each in used if each.model in models]
    whole = sum(each.cost for each in kept)
    assert (await ranking.total(part))["cost"] == whole
    page = await ranking.groups(part, "tenant", "cost")
    assert {group.tenant: group.cost for group in page.groups} == {
        tenant: sum(each.cost for each in kept if each.tenant == tenant) for tenant in ("n0", "n1", "n2")
    }
    by_model = await ranking.groups(part, "model", "cost")
    assert sorted(group.cost for group in by_model.groups) == sorted(
        sum(each.cost for each in kept if (each.tenant, each.model) == name) for name in owned if name[1] in models
    )
    steps = await ranking.steps(part, "day")
    assert total_of(steps) == await ranking.total(part)
    assert by_day(await ranking.steps(part, "hour")) == steps
    curves = await ranking.curves(part, "tenant", page.groups, "cost", "day", steps)
    days = {each.created_at.replace(hour=0, minute=0, second=0, microsecond=0) for each in kept}
    assert curves.starts == sorted(days)
    assert sum(curves.total) == sum(sum(values) for _, values in curves.groups) == whole
