"""Usage by hour, month and end user, in pages and as a stream, against sums made from the rows in plain Python."""

import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.billing.writer import UsageWriter
from gateway.errors import BadRequest
from gateway.records.sql.database import Database
from gateway.records.usage.report import UsageReport, UsageSums
from gateway.records.usage.rows import UsageFilter
from gateway.usage_row import UsageRow
from testing.gateway.rows import row

START = datetime(2026, 1, 30, 22, 40, tzinfo=UTC)
END = datetime(2026, 2, 2, 1, 20, tzinfo=UTC)


def rows(number: int = 300) -> list[UsageRow]:
    """Return requests over three days, around the end of a month."""
    chance = random.Random(7)
    return [
        row(
            f"req_{i:04}",
            created_at=datetime(2026, 1, 30, tzinfo=UTC) + timedelta(seconds=chance.randrange(4 * 86400)),
            tenant_id=f"t{i % 2}",
            tenant=f"n{i % 2}",
            model=chance.choice(("base", "pirate")),
            end_user=chance.choice((None, "ann", "bob")),
            cost=chance.randrange(1000),
        )
        for i in range(number)
    ]


STARTS: dict[str, Callable[[UsageRow], Any]] = {
    "hour": lambda each: each.created_at.replace(minute=0, second=0),
    "day": lambda each: each.created_at.replace(hour=0, minute=0, second=0),
    "month": lambda each: each.created_at.replace(day=1, hour=0, minute=0, second=0),
    "end_user": lambda each: each.end_user,
    "model": lambda each: each.model,
}


def expected(group_by: tuple[str, ...], since: datetime, until: datetime) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for each in rows():
        if since <= each.created_at < until:
            found[each.tenant, *(STARTS[name](each) for name in group_by)] += each.cost
    return found


def costs(group_by: tuple[str, ...], groups: list[UsageSums]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for sums in groups:
        key = (sums.tenant, *(getattr(sums, name) for name in group_by))
        assert key not in found, "a group twice"
        found[key] = sums.cost
    return found


GROUPINGS = [("hour",), ("month",), ("month", "model"), ("end_user",), ("hour", "end_user"), ("day", "hour", "month")]


@pytest.mark.parametrize("group_by", GROUPINGS, ids=",".join)
async def test_groups_are_the_sums_of_their_rows(database: Database, group_by: tuple[str, ...]):
    await UsageWriter(database).write(rows())
    report = UsageReport(database)
    for since, until in ((START, END), (START, START + timedelta(minutes=7)), (START.replace(minute=0), END)):
        groups = await report.sums(group_by, since=since, until=until)
        assert costs(group_by, groups) == expected(group_by, since, until)
        streamed = [
            sums async for part in report.stream(group_by, UsageFilter(), since, until, at_once=7) for sums in part
        ]
        assert streamed == groups


@pytest.mark.parametrize("group_by", GROUPINGS, ids=",".join)
async def test_pages_have_every_group_once(database: Database, group_by: tuple[str, ...]):
    await UsageWriter(database).write(rows())
    report, found, after = UsageReport(database), [], None
    while True:
        page = await report.page(group_by, since=START, until=END, after=after, limit=3)
        found += page.groups
        after = page.next
        if after is None:
            break
    assert costs(group_by, found) == expected(group_by, START, END)
    assert page.total["cost"] == sum(sums.cost for sums in found)


async def test_filters_narrow_a_stream(database: Database):
    await UsageWriter(database).write(rows())
    report = UsageReport(database)
    criteria = UsageFilter(tenant="n1", models=["pirate"], key_id="k")
    [[sums]] = [part async for part in report.stream((), criteria, START, END, at_once=10)]
    wanted = [each for each in rows() if each.tenant == "n1" and each.model == "pirate"]
    assert sums.cost == sum(each.cost for each in wanted if START <= each.created_at < END)
    assert [part async for part in report.stream((), UsageFilter(key_id="other"), START, END, at_once=10)] == []


async def test_end_users_need_a_period_that_is_not_too_long(database: Database):
    report = UsageReport(database)
    for since in (None, END - timedelta(days=40)):
        with pytest.raises(BadRequest, match="by end user"):
            await report.page(("end_user",), since=since, until=END)
