"""Rankings by end user: exact over the whole period, and bounded whatever number of end users a tenant has."""

import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, update

from gateway.billing.writer import UsageWriter
from gateway.errors import BadRequest
from gateway.records.maintenance.retention import Retention
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage
from gateway.records.usage import end_user_sums
from gateway.records.usage import ranking as usage_ranking
from gateway.records.usage.end_user_sums import Candidate, read_largest
from gateway.records.usage.end_user_tables import usage_end_user_days
from gateway.records.usage.ranked_groups import Part, RankedGroup
from gateway.records.usage.ranking import UsageRanking
from gateway.records.usage.rows import UsageFilter
from gateway.usage_row import UsageRow
from testing.gateway.rows import row

NOW = datetime.now(UTC)
START = (NOW - timedelta(days=9)).replace(hour=0, minute=0, second=0, microsecond=0)
WHOLE = Part(criteria=UsageFilter(), since=START, until=None)
PARTIAL = Part(criteria=UsageFilter(), since=NOW - timedelta(days=7, hours=5), until=NOW - timedelta(hours=3))
VALUES: dict[str, Callable[[Any], int]] = {
    "cost": lambda each: each.cost,
    "tokens": lambda each: each.prompt_tokens + each.completion_tokens,
    "cached_tokens": lambda each: each.cached_tokens,
}


def rows(number: int = 500) -> list[UsageRow]:
    """Return usage of eight tenants: a few large ones, and end users of the same names in several."""
    chance = random.Random(5)
    return [
        row(
            f"r{i:05}",
            tenant_id=f"t{(tenant := int(8 ** chance.random()))}",
            tenant=f"n{tenant}",
            model=chance.choice(("base", "pirate")),
            end_user=chance.choice((None, *(f"user-{tenant}-{j}" for j in range(7)), "shared")),
            cost=chance.randrange(1000),
            prompt_tokens=chance.randrange(100),
            completion_tokens=chance.randrange(100),
            cached_tokens=chance.randrange(3),
            created_at=NOW - timedelta(seconds=chance.randrange(10 * 86400)),
        )
        for i in range(number)
    ]


def expected(part: Part, order: str) -> list[tuple[str, str, int]]:
    """Return tenant's id, end user and value, the largest first, made from the rows in plain Python."""
    found: dict[tuple[str, str], int] = {}
    for each in rows():
        if part.since <= each.created_at < (part.until or NOW + timedelta(days=1)):
            key = (each.tenant_id, each.end_user or "")
            found[key] = found.get(key, 0) + VALUES[order](each)
    return sorted(((*key, value) for key, value in found.items()), key=lambda item: (-item[2], *item))


def shown(groups: Sequence[RankedGroup], order: str) -> list[tuple[Any, ...]]:
    return [(group.tenant_id, group.end_user, VALUES[order](group)) for group in groups]


@pytest.mark.parametrize("order", VALUES)
@pytest.mark.parametrize("part", [WHOLE, PARTIAL], ids=["whole days", "edges"])
async def test_every_page_is_exact(database: Database, monkeypatch: pytest.MonkeyPatch, part: Part, order: str):
    monkeypatch.setattr(end_user_sums, "RANKED_AT_ONCE", 10)
    await UsageWriter(database).write(rows())
    ranking, whole = UsageRanking(database), expected(part, order)
    found: list[Any] = []
    for offset in range(0, len(whole), 20):
        page = await ranking.groups(part, "end_user", order, offset=offset, limit=20)
        assert not page.is_partial
        assert page.has_more == (offset + 20 < len(whole))
        found += shown(page.groups, order)
    assert found == whole
    backwards = await ranking.groups(part, "end_user", order, descending=False, limit=5)
    assert [each[2] for each in shown(backwards.groups, order)] == sorted(each[2] for each in whole)[:5]
    by_name = await ranking.groups(part, "end_user", "name", descending=False, limit=1000)
    assert sorted(shown(by_name.groups, order)) == sorted(whole)


async def test_a_tenants_ranking_has_its_own_end_users(database: Database):
    await UsageWriter(database).write(rows())
    ranking = UsageRanking(database)
    for criteria in (UsageFilter(tenant="n2"), UsageFilter(tenant_id="t2")):
        part = msgspec.structs.replace(WHOLE, criteria=criteria)
        page = await ranking.groups(part, "end_user", "cost", limit=100)
        assert shown(page.groups, "cost") == [each for each in expected(WHOLE, "cost") if each[0] == "t2"]
    with_model = msgspec.structs.replace(WHOLE, criteria=UsageFilter(tenant="n2", models=["base"]))
    page = await ranking.groups(with_model, "end_user", "cost", limit=100)
    assert sum(group.cost for group in page.groups) == sum(
        each.cost for each in rows() if each.tenant == "n2" and each.model == "base" and each.created_at >= START
    )


async def test_only_tenants_that_can_be_on_the_page_are_read(database: Database, monkeypatch: pytest.MonkeyPatch):
    """A tenant with very many small end users is not read."""
    many = [row(f"m{i}", tenant_id="hostile", end_user=f"u{i}", cost=1, created_at=NOW) for i in range(600)]
    await UsageWriter(database).write([*rows(), *many])
    monkeypatch.setattr(end_user_sums, "RANKED_AT_ONCE", 1)
    monkeypatch.setattr(end_user_sums, "MAX_RANKED", 590)
    read: list[str] = []
    found_of = UsageRanking._found

    async def watched(self: UsageRanking, part: Part, *others: Any) -> Any:
        read.extend(part.criteria.tenant_ids or ())
        return await found_of(self, part, *others)

    monkeypatch.setattr(UsageRanking, "_found", watched)
    page = await UsageRanking(database).groups(WHOLE, "end_user", "cost", limit=5)
    assert shown(page.groups, "cost") == expected(WHOLE, "cost")[:5]
    assert (page.is_partial, page.has_more) == (False, True)
    assert "hostile" not in read
    assert 1 <= len(read) < 8


async def test_a_tenant_with_too_many_end_users_is_left_out(database: Database, monkeypatch: pytest.MonkeyPatch):
    """Its largest end user may be the largest of all, so the ranking cannot be known to be whole."""
    many = [row(f"m{i}", tenant_id="h", tenant="h", end_user=f"u{i}", created_at=NOW) for i in range(600)]
    await UsageWriter(database).write([*rows(), *many, row("m", tenant_id="h", end_user="u", cost=10**6)])
    await UsageWriter(database).write([row("n", tenant_id="h", tenant="h", end_user="u", cost=10**6, created_at=NOW)])
    monkeypatch.setattr(end_user_sums, "MAX_RANKED", 550)
    ranking = UsageRanking(database)
    page = await ranking.groups(WHOLE, "end_user", "cost", limit=5)
    assert page.is_partial
    assert shown(page.groups, "cost") == expected(WHOLE, "cost")[:5]
    monkeypatch.setattr(end_user_sums, "MAX_RANKED", 5000)
    page = await ranking.groups(WHOLE, "end_user", "cost", limit=5)
    assert shown(page.groups, "cost") == [("h", "u", 10**6), *expected(WHOLE, "cost")[:4]]
    # Chosen by itself, it is refused instead, and so is an order for which all end users would have to be read.
    monkeypatch.setattr(end_user_sums, "MAX_ROWS", 550)
    own = msgspec.structs.replace(WHOLE, criteria=UsageFilter(tenant="h"))
    for part, order in ((own, "cost"), (WHOLE, "name")):
        with pytest.raises(BadRequest, match="at most 550 requests"):
            await ranking.groups(part, "end_user", order)


async def test_a_day_without_all_sums_is_read_from_rows(database: Database):
    await UsageWriter(database).write(rows())
    async with database.write() as connection:
        day = START + timedelta(days=4)
        await connection.execute(delete(usage_end_user_days).where(usage_end_user_days.c.day == day))
        others = usage.c.created_at < day, usage.c.created_at >= day + timedelta(days=1)
        for gone in others:
            await connection.execute(update(usage).where(gone).values(cost=0))
    page = await UsageRanking(database).groups(WHOLE, "end_user", "cost", limit=100)
    assert shown(page.groups, "cost") == expected(WHOLE, "cost")


async def test_requests_during_a_ranking_do_not_make_it_read_rows(database: Database, monkeypatch: pytest.MonkeyPatch):
    """The ledger commits a request of the present day after each read of the database."""
    writer, number, read = UsageWriter(database), itertools.count(), Database.read
    today = {"tenant_id": "t1", "tenant": "n1", "end_user": "shared", "created_at": NOW}
    await writer.write([*rows(), *(row(f"today{i}", **today) for i in range(400))])

    @asynccontextmanager
    async def then_write(self: Database, **options: Any) -> AsyncIterator[Any]:
        async with read(self, **options) as connection:
            yield connection
        await writer.write([row(f"new{next(number)}", **today)])

    monkeypatch.setattr(Database, "read", then_write)
    monkeypatch.setattr(end_user_sums, "MAX_ROWS", 300)
    for criteria in (UsageFilter(), UsageFilter(tenant="n1")):
        page = await UsageRanking(database).groups(
            msgspec.structs.replace(WHOLE, criteria=criteria), "end_user", "requests"
        )
        assert (page.groups[0].end_user, page.lacks_usage) == ("shared", False)
        assert page.groups[0].requests > 400
    assert next(number) > 4


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole days", "a part of a day without sums"])
async def test_removed_days_are_not_counted_but_noted(
    database: Database, monkeypatch: pytest.MonkeyPatch, is_cut: bool
):
    """Retention has removed 300 requests of one day, and some of another whose sums an earlier release lacked."""
    old = [row(f"old{i}", tenant_id="t1", tenant="n1", created_at=START + timedelta(days=1)) for i in range(300)]
    await UsageWriter(database).write([*rows(), *old])
    day = START + timedelta(days=5)
    if is_cut:
        async with database.write() as connection:
            await connection.execute(delete(usage_end_user_days).where(usage_end_user_days.c.day == day))
    moment = day + timedelta(hours=12)
    await Retention(database).prune_usage(datetime.now(UTC) - moment)
    monkeypatch.setattr(end_user_sums, "MAX_ROWS", 290)
    ranking = UsageRanking(database)
    left = expected(msgspec.structs.replace(WHOLE, since=moment if is_cut else day), "cost")
    for tenant_id in (None, "t1"):
        criteria = UsageFilter(tenant_id=tenant_id)
        page = await ranking.groups(msgspec.structs.replace(WHOLE, criteria=criteria), "end_user", "cost", limit=100)
        assert shown(page.groups, "cost") == [each for each in left if tenant_id in (None, each[0])]
        assert (page.lacks_usage, page.is_partial) == (True, False)
        later = Part(criteria=criteria, since=day + timedelta(days=1), until=None)
        assert not (await ranking.groups(later, "end_user", "cost")).lacks_usage
        before = Part(criteria=criteria, since=START, until=day)
        compared = await ranking.earlier(before, "end_user", page.groups, "cost")
        assert {group.before for group in compared} == {None}
    by_model = msgspec.structs.replace(WHOLE, criteria=UsageFilter(models=["base"]))
    assert (await ranking.groups(by_model, "end_user", "cost")).lacks_usage


@pytest.mark.parametrize("step", ["day", "hour"])
async def test_curves_and_comparison_add_up(database: Database, monkeypatch: pytest.MonkeyPatch, step: Any):
    await UsageWriter(database).write(rows())
    ranking = UsageRanking(database)
    page = await ranking.groups(PARTIAL, "end_user", "cost", limit=4)
    curves = await ranking.curves(PARTIAL, "end_user", page.groups, "cost", step, await ranking.steps(PARTIAL, step))
    assert [sum(values) for _, values in curves.groups] == [group.cost for group in page.groups]
    assert sum(curves.total) == sum(each[2] for each in expected(PARTIAL, "cost"))
    before = Part(criteria=UsageFilter(), since=PARTIAL.since - timedelta(days=2), until=PARTIAL.since)
    costs = {each[:2]: each[2] for each in expected(before, "cost")}
    compared = await ranking.earlier(before, "end_user", page.groups, "cost")
    assert [group.before for group in compared] == [
        costs.get((group.tenant_id, group.end_user), 0) for group in page.groups
    ]
    # Rather than reading many rows, the page lacks both.
    monkeypatch.setattr(usage_ranking, "MAX_COMPARED", 0)
    assert [group.before for group in await ranking.earlier(before, "end_user", page.groups, "cost")] == [None] * 4
    without = await ranking.curves(PARTIAL, "end_user", page.groups, "cost", step, await ranking.steps(PARTIAL, step))
    assert (without.groups, without.total) == ([], curves.total)


async def test_the_largest_are_found_whatever_the_bounds_and_sizes(monkeypatch: pytest.MonkeyPatch):
    """Compare with a sort of everything, for many random tenants, ties included."""
    monkeypatch.setattr(end_user_sums, "MAX_RANKED", 40)
    monkeypatch.setattr(end_user_sums, "RANKED_AT_ONCE", 9)
    monkeypatch.setattr(end_user_sums, "MAX_TENANTS", 12)
    chance, complete = random.Random(3), 0
    for _ in range(500):
        tenants = {f"{i:02}": [chance.randrange(30) for _ in range(chance.randrange(1, 9))] for i in range(15)}
        candidates = sorted(
            (Candidate(name, max(values) + chance.randrange(4), len(values)) for name, values in tenants.items()),
            key=lambda candidate: (-candidate.most, candidate.tenant_id),
        )
        number = chance.randrange(1, 20)

        async def read(ids: list[str], of: dict[str, list[int]] = tenants, number: int = number) -> list[Any]:
            found = [Found(name, value) for name in ids for value in of[name]]
            return sorted(found, key=lambda each: (-each.value, each.tenant_id))[:number]

        got, is_partial = await read_largest(candidates[:13], number, read, lambda each: each.value)
        whole = await read(list(tenants), number=number)
        if not is_partial:
            complete += 1
            assert got == whole
    assert 100 < complete < 500


async def test_the_choice_of_many_small_tenants_is_quick():
    """The choice runs on the event loop: with a sum over the chosen ones for each candidate it took 0.1 s."""
    candidates = [Candidate(f"t{i:05}", 1, 1) for i in range(end_user_sums.MAX_TENANTS)]
    asked: list[str] = []

    async def read(ids: list[str]) -> list[Any]:
        asked.extend(ids)
        return []

    spent = []
    for _ in range(3):
        asked.clear()
        began = time.thread_time()
        assert await read_largest(candidates, 51, read, lambda each: each.value) == ([], False)
        spent.append(time.thread_time() - began)
    assert len(asked) == len(candidates)
    assert min(spent) < 0.02


class Found(msgspec.Struct, frozen=True):
    tenant_id: str
    value: int


async def test_the_tenants_of_exact_bounds_are_read_once_around_the_page():
    """The bounds of a single day are exact, so as many tenants as the page has places are enough."""
    candidates = [Candidate(f"t{i:05}", 2000 - i, 3) for i in range(1000)]
    asked: list[str] = []

    async def read(ids: list[str]) -> list[Any]:
        asked.extend(ids)
        return [Found(name, 2000 - int(name[1:]) - less) for name in ids for less in (0, 900, 1500)]

    found, is_partial = await read_largest(candidates, 51, read, lambda each: each.value)
    assert [each.value for each in found] == list(range(2000, 1949, -1))
    assert (len(asked), is_partial) == (51, False)
