"""Sums for charts of rows from an earlier release: rebuilt exactly, whatever gateways of both releases have written."""

import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, select

from gateway.billing import activity_rebuild
from gateway.billing.activity_rebuild import ActivityRebuild
from gateway.billing.writer import UsageWriter
from gateway.records.activity.tables import ACTIVITY, activity_series
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage
from testing.gateway.rows import row

NOW = datetime.now(UTC)
MODELS = (("base", None), ("pirate", "d"), ("pirate*0.5+terse*0.5", "d"), ("pirate*0.4+terse*0.6", None))
STATUSES = ("ok", "cancelled", "error", "limited", "of a later release")


@pytest.fixture(autouse=True)
def at_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set NOW at the beginning of each test, which may run an hour after the import."""
    monkeypatch.setattr(sys.modules[__name__], "NOW", datetime.now(UTC))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_rebuild, "PAUSE_SECONDS", 0.0)


async def fill(database: Database, name: str, number: int, hours: float) -> None:
    """Write rows of the last `hours`, from both edges of buckets and of periods."""
    minute = NOW.replace(second=0, microsecond=0)
    rows = []
    for i in range(number):
        model, digest = MODELS[i % 4]
        at = minute - timedelta(minutes=int(60 * hours * i / number), microseconds=i % 3 % 2)
        rows.append(
            row(
                f"{name}{i}",
                tenant_id=f"t{i % 3}",
                tenant=f"n{i % 3}",
                model=model,
                adapter_digest=digest,
                engine=("http://a", "http://b", None)[i % 3],
                status=STATUSES[i % 5],
                created_at=at,
                queue_ms=(None, 7)[i % 2],
                latency_ms=(5, 6, 4 + i, 300_000, 300_001)[i % 5],
                ttft_ms=(None, 0, 5, 60_001)[i % 4],
            )
        )
    await UsageWriter(database).write(rows)


async def sums(database: Database) -> list[list[tuple[Any, ...]]]:
    async with database.read() as connection:
        tables = (activity_series, *ACTIVITY.values())
        return [sorted(map(tuple, await connection.execute(select(table)))) for table in tables]


async def test_sums_of_rows_without_any_are_rebuilt(database: Database):
    await fill(database, "r", 200, hours=30)
    expected = await sums(database)
    async with database.write() as connection:
        for table in (activity_series, *ACTIVITY.values()):
            await connection.execute(delete(table))
    rebuild = ActivityRebuild(database, timedelta(days=2))
    assert await rebuild.run() >= 2
    assert await sums(database) == expected
    assert await rebuild.run() == 0


async def test_a_day_of_both_releases_gets_all_its_rows(database: Database):
    await fill(database, "old", 60, hours=1)
    async with database.write() as connection:
        for table in ACTIVITY.values():
            await connection.execute(delete(table))
    await fill(database, "new", 60, hours=1)
    rebuild = ActivityRebuild(database, timedelta(days=2))
    assert await rebuild.run() >= 1
    found = await sums(database)
    # Written again by this release, the sums are the same.
    async with database.write() as connection:
        for table in (usage, *ACTIVITY.values()):
            await connection.execute(delete(table))
    await fill(database, "old", 60, hours=1)
    await fill(database, "new", 60, hours=1)
    assert await sums(database) == found


async def test_days_whose_rows_were_removed_stay_as_they_are(database: Database):
    await fill(database, "r", 40, hours=60)
    day = ACTIVITY[86400]
    async with database.write() as connection:
        await connection.execute(delete(usage).where(usage.c.created_at < NOW - timedelta(hours=30)))
        await connection.execute(delete(day).where(day.c.kind == 3))
    before = (await sums(database))[-1]
    await ActivityRebuild(database, timedelta(days=2)).run()
    after = (await sums(database))[-1]
    oldest = min(each[1] for each in before)
    assert [each for each in after if each[1] == oldest] == [each for each in before if each[1] == oldest]
