"""Sums by end user: always those of the rows, whatever is written twice, at once, or by an earlier release."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.billing import activity_rebuild, end_user_rebuild
from gateway.billing.activity_rebuild import ActivityRebuild
from gateway.billing.end_user_writer import EndUserWriter
from gateway.billing.writer import UsageWriter
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage
from gateway.records.usage.end_user_tables import SUMMED, usage_end_user_days, usage_end_users
from gateway.records.usage.report import UsageReport
from gateway.records.usage.rows import UsageFilter
from gateway.usage_row import UsageRow
from testing.gateway.rows import row

DAY = timedelta(days=1)
START = datetime(2026, 1, 30, tzinfo=UTC)
USERS = (None, "", "ann", "Ann", "ann ", "\u00e4nn \U0001f680", "x" * 128)


def rows(number: int, seed: int = 1) -> list[UsageRow]:
    """Return requests of four days around the end of a month, some at the very edges of days."""
    chance = random.Random(seed)
    edges = [START + i * DAY + timedelta(microseconds=each) for i in range(4) for each in (-1, 0, 1)]
    found = []
    for i in range(number):
        tenant = chance.choice("abc")
        at = START + timedelta(microseconds=chance.randrange(4 * 86400 * 10**6))
        found.append(
            row(
                f"r{seed}-{i:05}",
                tenant_id=f"t{tenant}",
                tenant=f"n{tenant}",
                model=chance.choice(("base", "pirate")),
                key_id=chance.choice(("k1", "k2")),
                end_user=chance.choice(USERS),
                # Some requests cost nothing, as those that an engine's death has ended.
                cost=chance.choice((0, 0, chance.randrange(10**6))),
                prompt_tokens=chance.randrange(100),
                completion_tokens=chance.randrange(100),
                cached_tokens=chance.randrange(10),
                created_at=chance.choice(edges) if i % 5 == 0 else at,
            )
        )
    return found


async def sums(database: Database) -> tuple[list[Any], list[Any]]:
    """Return the sums by end user, and their numbers and maxima."""
    async with database.read() as connection:
        tables = (usage_end_users, usage_end_user_days)
        first, second = [sorted(map(tuple, await connection.execute(select(table)))) for table in tables]
        return first, second


async def sums_of_rows(database: Database) -> tuple[list[Any], list[Any]]:
    """Return the same, made from the rows of the database in plain Python."""
    found: dict[tuple[Any, ...], list[int]] = {}
    async with database.read() as connection:
        for each in await connection.execute(select(usage)):
            day = each.created_at.replace(hour=0, minute=0, second=0, microsecond=0)
            entry = found.setdefault((day, each.tenant_id, each.end_user or "", each.tenant), [0] * 5)
            for i, amount in enumerate((1, *(getattr(each, name) for name in SUMMED[1:]))):
                entry[i] += amount
    days: dict[tuple[Any, ...], list[list[int]]] = {}
    for key, values in found.items():
        days.setdefault(key[:2], []).append(values)
    numbers = [
        (*key, len(each), sum(values[0] for values in each), *(max(column) for column in zip(*each, strict=True)))
        for key, each in days.items()
    ]
    return sorted((*key, *values) for key, values in found.items()), sorted(numbers)


async def forget(database: Database, *criteria: Any) -> None:
    """Remove sums of whole days and tenants, as if an earlier release had written the rows."""
    async with database.write() as connection:
        for table in (usage_end_users, usage_end_user_days):
            own = [table.c[name] == value for name, value in criteria]
            await connection.execute(delete(table).where(*own))


async def by_end_user(database: Database) -> dict[Any, int]:
    report = UsageReport(database)
    page = await report.page(("end_user",), since=START - DAY, until=START + 5 * DAY)
    return {(each.tenant, each.end_user): each.cost for each in page.groups}


@pytest.fixture
def earlier_release(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a writer that writes no sums by end user."""

    async def write(database: Database, some: list[UsageRow]) -> None:
        async def nothing(*_: object) -> None: ...

        with monkeypatch.context() as patch:
            patch.setattr(EndUserWriter, "add", nothing)
            await UsageWriter(database).write(some)

    return write


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_rebuild, "PAUSE_SECONDS", 0.0)


async def test_sums_are_those_of_the_rows(database: Database):
    """Requests are retried with the same id, in the same batch and in later ones."""
    writer, made = UsageWriter(database), rows(400)
    for start in range(0, 400, 80):
        again = [made[i] for i in range(0, start, 7)]
        await writer.write([*made[start : start + 80], *again, *made[start : start + 5]])
        assert await sums(database) == await sums_of_rows(database)
    async with database.read() as connection:
        assert (await connection.execute(select(func.count()).select_from(usage))).scalar_one() == 400


async def test_writers_at_once_lose_nothing(migrated_postgres_url: str):
    databases, made = [Database(migrated_postgres_url) for _ in range(2)], rows(400)

    async def write(database: Database, step: int) -> None:
        writer = UsageWriter(database)
        for start in range(0, 400, 40):
            await writer.write([made[(start + i) * step % 400] for i in range(80)])

    await asyncio.gather(*(write(database, step) for database in databases for step in (1, 7, 399)))
    assert await sums(databases[0]) == await sums_of_rows(databases[0])
    for database in databases:
        await database.close()


@pytest.mark.parametrize("most", [5, 30, 1000])
async def test_rows_of_an_earlier_release_are_summed(
    database: Database, earlier_release: Any, monkeypatch: pytest.MonkeyPatch, most: int
):
    """Some days have no sums, some lack requests of one tenant; a day that is right is not touched.

    most: number of requests beyond which a tenant's day is summed by the hour.
    """
    monkeypatch.setattr(end_user_rebuild, "MAX_REQUESTS", most)
    await UsageWriter(database).write(rows(200))
    await forget(database, ("day", START))
    await forget(database, ("day", START + DAY), ("tenant_id", "tb"))
    later = [each for each in rows(100, seed=2) if each.created_at < START + 3 * DAY]
    await earlier_release(database, later)
    assert await sums(database) != await sums_of_rows(database)
    rebuild = ActivityRebuild(database, timedelta(days=2))
    assert await rebuild.run() >= 3
    assert await sums(database) == await sums_of_rows(database)
    assert await rebuild.run() == 0


async def test_rows_that_an_earlier_release_writes_late_are_summed(database: Database, earlier_release: Any):
    """A gateway may write the rows of its journal days later. The same process has found these days right before."""
    made = rows(200)
    await UsageWriter(database).write(made[:100])
    rebuild = ActivityRebuild(database, timedelta(days=2))
    assert await rebuild.run() == 0
    await earlier_release(database, [each for each in made[100:] if each.created_at < START + DAY])
    assert await sums(database) != await sums_of_rows(database)
    assert await rebuild.run() > 0
    assert await sums(database) == await sums_of_rows(database)
    assert await rebuild.run() == 0


async def test_a_request_during_the_check_of_a_day_does_not_rebuild_it(migrated_postgres_url: str):
    """The ledger commits a request of the day after each of the first statements."""
    database, writer = Database(migrated_postgres_url), UsageWriter(Database(migrated_postgres_url))
    made = [msgspec.structs.replace(each, created_at=START) for each in rows(60)]
    await writer.write(made[:40])
    execute, left = AsyncConnection.execute, iter(made[40:42])

    async def then_write(self: AsyncConnection, *args: Any, **options: Any) -> Any:
        found = await execute(self, *args, **options)
        if self.engine is database._engine and (new := next(left, None)):
            await writer.write([new])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncConnection, "execute", then_write)
        assert not await end_user_rebuild.EndUserRebuild(database).check(START, 0.0)
    assert next(left) is made[41]
    for each in (database, writer._database):
        await each.close()


async def test_days_of_both_releases_are_shown_right_before_they_are_rebuilt(database: Database, earlier_release: Any):
    """The present release has the sums of some requests of a day only, or of one tenant's only."""
    made = rows(300)
    await UsageWriter(database).write(made[:150])
    await earlier_release(database, made[150:250])
    await UsageWriter(database).write(made[250:])
    expected: dict[Any, int] = {}
    for each in made:
        key = (each.tenant, each.end_user or None)
        expected[key] = expected.get(key, 0) + each.cost
    assert await by_end_user(database) == expected
    await forget(database)
    assert await by_end_user(database) == expected
    await ActivityRebuild(database, timedelta(days=2)).run()
    assert await by_end_user(database) == expected


async def test_whole_days_are_read_from_the_sums(database: Database):
    """The rows of a summed day are gone, but its report by end user is the same. Filters by key and model need rows."""
    await UsageWriter(database).write(rows(300))
    before = await by_end_user(database)
    async with database.write() as connection:
        await connection.execute(delete(usage))
    assert await by_end_user(database) == before
    report, times = UsageReport(database), {"since": START, "until": START + 2 * DAY}
    assert (await report.page(("end_user",), tenant="na", **times)).total["requests"] > 0
    assert (await report.page(("end_user", "day"), tenant_id="ta", **times)).total["requests"] > 0
    assert (await report.page(("end_user",), models=["base"], **times)).total["requests"] == 0
    assert (await report.page(("end_user", "key"), **times)).total["requests"] == 0
    assert (await report.page(("end_user", "hour"), **times)).total["requests"] == 0
    half = {"since": START, "until": START + timedelta(hours=12)}
    assert (await report.page(("end_user",), **half)).total["requests"] == 0


async def test_days_whose_rows_are_gone_are_left_as_they_are(database: Database):
    await UsageWriter(database).write(rows(100))
    async with database.write() as connection:
        await connection.execute(delete(usage).where(usage.c.created_at < START + 1.5 * DAY))
    await forget(database, ("day", START), ("tenant_id", "ta"))
    await forget(database, ("day", START + DAY), ("tenant_id", "ta"))
    before = await sums(database)
    await ActivityRebuild(database, timedelta(days=2)).run()
    assert await sums(database) == before


@pytest.mark.parametrize("is_whole", [True, False])
async def test_every_grouping_and_period_equals_the_rows(database: Database, is_whole: bool):
    made = rows(300)
    await UsageWriter(database).write(made)
    report, criteria = UsageReport(database), UsageFilter()
    edge = timedelta() if is_whole else timedelta(hours=5, minutes=3)
    since, until = START + edge, START + 3 * DAY - edge
    starts = {"day": "%Y-%m-%d", "month": "%Y-%m"}
    for group_by in (("end_user",), ("end_user", "day"), ("end_user", "month"), ("tenant", "end_user", "day", "month")):
        expected: dict[Any, int] = {}
        for each in made:
            if since <= each.created_at < until:
                times = [f"{each.created_at:{starts[name]}}" for name in group_by if name in starts]
                key = (each.tenant, each.end_user or None, *times)
                expected[key] = expected.get(key, 0) + each.prompt_tokens
        found = {}
        async for part in report.stream(group_by, criteria, since, until, at_once=7):
            for group in part:
                times = [f"{getattr(group, name):{starts[name]}}" for name in group_by if name in starts]
                found[group.tenant, group.end_user, *times] = group.prompt_tokens
        assert found == expected, group_by
