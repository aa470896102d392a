"""Retention and `usage prune` on partitions: old months are dropped as a whole, with the exact number and cost."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Engine, event, func, select

from gateway.billing.writer import UsageWriter
from gateway.errors import Unavailable
from gateway.records.maintenance import retention
from gateway.records.maintenance.retention import Retention
from gateway.records.partitions import partitions
from gateway.records.partitions.partitioning import partition
from gateway.records.partitions.partitions import Partitions, changing_partitions, make_month, next_month
from gateway.records.sql.database import MIGRATION_LOCK, Database
from gateway.records.sql.tables import usage, usage_daily
from gateway.records.usage.end_user_tables import usage_end_users
from testing.gateway.partitions import end_first
from testing.gateway.rows import row
from testing.gateway.running import until

START = date(2026, 3, 1)
MONTHS = [START, next_month(START), next_month(next_month(START))]
APRIL, MAY = (datetime(2026, month, 1, tzinfo=UTC) for month in (4, 5))


def spread(month: date, number: int) -> datetime:
    """Return one of a month's moments, hours apart."""
    return datetime(month.year, month.month, 1, tzinfo=UTC) + timedelta(hours=17 * number, seconds=5)


@pytest.fixture
async def database(migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    """Return a database with partitions of three past months, of 40 rows each, and 10 rows of random ids before."""
    monkeypatch.setattr(retention, "AT_ONCE", 7)
    database = Database(migrated_postgres_url)
    writer, before = UsageWriter(database), datetime(2026, 2, 20, tzinfo=UTC)
    await writer.write([row(f"req_{i}", created_at=before + timedelta(hours=i), cost=100 + i) for i in range(10)])
    await partition(database, lambda line: None)
    await end_first(database, START)
    for month in MONTHS:
        async with changing_partitions(database) as connection:
            assert await make_month(connection, month)
    times = [spread(month, i) for month in MONTHS for i in range(40)]
    rows = [row(f"req_g{at:%Y%m%d%H%M%S}{'0' * 17}", created_at=at, cost=at.day, end_user="u") for at in times]
    await writer.write(rows)
    yield database
    await database.close()


async def names(database: Database) -> list[str]:
    """Return the partitions of past months and the first one."""
    async with database.read() as connection:
        found = [each.name for each in await partitions.read_partitions(connection)]
    return [name for name in found if name[:12] <= "usage_202605" or name == "usage_first"]


async def amount(database: Database, before: datetime | None = None) -> tuple[int, int]:
    """Return the number and cost of all rows, or of those from before a moment."""
    query = select(func.count(), func.coalesce(func.sum(usage.c.cost), 0))
    query = query if before is None else query.where(usage.c.created_at < before)
    async with database.read() as connection:
        rows, cost = (await connection.execute(query)).one()
    return rows, int(cost)


async def days(database: Database) -> int:
    async with database.read() as connection:
        return int((await connection.execute(select(func.sum(usage_daily.c.requests)))).scalar_one())


async def test_whole_months_are_dropped_and_the_rest_deleted(database: Database, monkeypatch: pytest.MonkeyPatch):
    removed: list[Any] = []
    monkeypatch.setattr(Retention, "_remove_end_users", _noting(Retention._remove_end_users, removed))
    of, middle = Retention(database), datetime(2026, 5, 10, tzinfo=UTC)
    expected = await amount(database, middle)
    assert expected[0] == 10 + 2 * 40 + 13
    assert await of.count_usage(middle) == expected
    assert await of.remove_usage(middle, 1_000_000) == expected
    assert await names(database) == ["usage_202605"]
    assert await amount(database, middle) == (0, 0)
    assert (await amount(database))[0] == 130 - expected[0]
    assert await days(database) == 130
    assert removed == [middle]
    async with database.read() as connection:
        assert (await connection.execute(select(func.min(usage_end_users.c.day)))).scalar_one() == middle
    assert await of.remove_usage(middle, 1_000_000) == (0, 0)


def _noting(remove: Any, calls: list[datetime]) -> Any:
    async def noting(self: Retention, before: datetime) -> None:
        calls.append(before)
        await remove(self, before)

    return noting


async def test_only_whole_months_are_dropped(database: Database):
    """Nothing is deleted by rows here, so what is left of the table shows what was dropped."""
    of = Partitions(database)
    await of.detach(MAY - timedelta(seconds=1))
    assert await names(database) == ["usage_202604", "usage_202605"]
    assert len(await of.detached()) == 2
    assert (await of.count_detached())[0] == 50


async def test_a_month_with_a_later_row_is_not_dropped(database: Database):
    """A gateway whose clock is behind Redis' makes ids of the month before."""
    late = row("req_g20260430235959" + "f" * 17, created_at=MAY, cost=1000)
    await UsageWriter(database).write([late])
    expected = await amount(database, MAY)
    assert await Retention(database).remove_usage(MAY, 1_000_000) == expected
    assert await names(database) == ["usage_202604", "usage_202605"]
    assert (await amount(database))[0] == 41
    # The next removal finds no later row.
    assert await Retention(database).remove_usage(MAY + timedelta(seconds=1), 1000) == (1, 1000)
    assert await names(database) == ["usage_202605"]


async def test_the_sum_of_a_removal_that_was_stopped_is_exact(database: Database):
    """A process dies between a partition's detachment and its removal; the next removal counts and drops it."""
    of, all_of_them = Retention(database), await amount(database, MAY)
    await Partitions(database).detach(MAY)
    assert (await amount(database, MAY)) == (0, 0)
    # A row of a dropped month, from the journal of a gateway that was away, still has a place.
    await UsageWriter(database).write([row("req_g20260410000000" + "e" * 17, created_at=APRIL, cost=7)])
    expected = (all_of_them[0] + 1, all_of_them[1] + 7)
    assert await of.count_usage(MAY) == expected
    assert await of.remove_usage(MAY, 1_000_000) == expected
    assert await of.count_usage(MAY) == (0, 0)
    assert await Partitions(database).detached() == []


async def test_a_detached_table_is_counted_by_one_process(database: Database):
    await Partitions(database).detach(MAY)
    found = await Partitions(database).detached()
    once = [await Partitions(database).drop(name) for name in found]
    again = [await Partitions(database).drop(name) for name in found]
    assert sum(rows for rows, _ in once) == 90
    assert again == [(0, 0)] * 3


async def test_a_table_that_cannot_be_dropped_stops_no_other(database: Database, migrated_postgres_url: str):
    of, before = Retention(database), datetime(2026, 5, 10, tzinfo=UTC)
    await Partitions(database).detach(APRIL)
    [first, march] = sorted(await Partitions(database).detached(), reverse=True)
    connection = await asyncpg.connect(migrated_postgres_url)
    await connection.execute(f"CREATE VIEW dear AS SELECT * FROM {march}")
    for remove in (of.remove_usage(before, 1000), of.prune_usage(datetime.now(UTC) - before)):
        with pytest.raises(Unavailable):
            await remove
        assert await Partitions(database).detached() == [march]
        assert await names(database) == ["usage_202605"]
        assert await amount(database, before) == (0, 0)
    async with database.read() as reader:
        assert (await reader.execute(select(func.min(usage_end_users.c.day)))).scalar_one() == before
    assert first != march
    await connection.execute("DROP VIEW dear")
    await connection.close()
    assert (await of.remove_usage(before, 1000))[0] == 40


async def test_partitions_that_are_in_use_do_not_stop_the_deletions(
    database: Database, migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(partitions, "TRIES", 1)
    monkeypatch.setattr(partitions, "LOCK_MS", 200)
    connection = await asyncpg.connect(migrated_postgres_url)
    await connection.execute("BEGIN; LOCK TABLE usage_202603 IN ACCESS SHARE MODE")
    with pytest.raises(Unavailable):
        await Retention(database).remove_usage(MAY, 1000)
    assert await amount(database, MAY) == (0, 0)
    await connection.close()
    assert await Retention(database).remove_usage(MAY, 1000) == (0, 0)
    assert await names(database) == ["usage_202605", "usage_first"]


async def test_migrations_do_not_wait_for_the_count(database: Database, migrated_postgres_url: str):
    await Partitions(database).detach(APRIL)
    name = (await Partitions(database).detached())[0]
    connection = await asyncpg.connect(migrated_postgres_url)
    await connection.execute(f"BEGIN; LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
    dropping = asyncio.create_task(Partitions(database).drop(name))

    async def is_waiting() -> bool:
        waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = $1::regclass"
        return bool(await connection.fetchval(waiting, name))

    await until(is_waiting)
    assert await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", MIGRATION_LOCK)
    await connection.close()
    assert (await dropping)[0] == 40


async def test_a_statement_counts_an_hour_at_most(database: Database):
    """A statement has ten seconds, and a day may have more rows than it reads in them."""
    taken: list[timedelta] = []

    def note(_connection: Any, _cursor: Any, statement: str, given: Any, *_: Any) -> None:
        if "count(*)" in statement:
            since, until = (each for each in given if isinstance(each, datetime))
            taken.append(until - since)

    expected = await amount(database, APRIL)
    event.listen(Engine, "before_cursor_execute", note)
    try:
        assert await Retention(database).count_usage(APRIL) == expected
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert len(taken) == 50
    assert max(taken) == timedelta(hours=1)


async def test_the_hourly_chore_drops_months(database: Database):
    assert await Retention(database).prune_usage(datetime.now(UTC) - APRIL) == 50
    assert await names(database) == ["usage_202604", "usage_202605"]
    assert await Retention(database).prune_usage(None) == 0
    # The present and later months stay, although they are empty.
    assert await Retention(database).prune_usage(datetime.now(UTC) - MAY) == 40
    assert await names(database) == ["usage_202605"]
    async with database.read() as connection:
        assert len(await partitions.read_partitions(connection)) == 1 + 1 + partitions.AHEAD + 1
