"""Retention: old sums by minute and old usage rows go; sums by hour and day stay exact, and go only if asked."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, func, select

from gateway.billing.activity_rebuild import ActivityRebuild
from gateway.billing.writer import UsageWriter
from gateway.records.activity.tables import ACTIVITY, ENGINE
from gateway.records.maintenance import housekeeping, retention
from gateway.records.maintenance.retention import Retention
from gateway.records.requests.refusal_tables import refusal_counts
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage, usage_daily, usage_hourly
from gateway.records.usage.end_user_tables import usage_end_user_days, usage_end_users
from gateway.records.usage.report import UsageReport
from gateway.settings import SettingsError
from testing.gateway.rows import row
from testing.gateway.running import running, settings, until

NOW = datetime.now(UTC)


@pytest.fixture(autouse=True)
def at_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set NOW at the beginning of each test, which may run an hour after the import."""
    monkeypatch.setattr(sys.modules[__name__], "NOW", datetime.now(UTC))


async def fill(database: Database) -> None:
    """Write a failed request for each of the last 80 hours."""
    rows = [
        row(f"r{i}", created_at=NOW - timedelta(hours=i), status="error", error_code="engine_error") for i in range(80)
    ]
    await UsageWriter(database).write(rows)


async def count(database: Database, table: Table, *which: Any) -> int:
    column = table.c.requests if "requests" in table.c else None
    async with database.read() as connection:
        amount = func.count() if column is None else func.coalesce(func.sum(column), 0)
        return int((await connection.execute(select(amount).select_from(table).where(*which))).scalar_one())


async def test_old_sums_by_minute_are_removed(database: Database, monkeypatch: Any):
    monkeypatch.setattr(retention, "AT_ONCE", 7)
    await fill(database)
    assert await Retention(database).prune_minutes(timedelta(hours=48)) > 0
    minute, hour, counts = ACTIVITY[60], ACTIVITY[3600], refusal_counts
    # The hours up to 49 remain.
    assert await count(database, minute, minute.c.kind == ENGINE) == 50
    assert await count(database, counts, counts.c.level == 60, counts.c.tenant_id == "t1") == 50
    assert await count(database, hour, hour.c.kind == ENGINE) == 80
    assert await count(database, counts, counts.c.level == 86400, counts.c.tenant_id == "t1") == 80
    assert await Retention(database).prune_minutes(timedelta(hours=48)) == 0


async def test_old_usage_rows_are_removed_only_if_asked(database: Database, monkeypatch: Any):
    monkeypatch.setattr(retention, "AT_ONCE", 7)
    await fill(database)
    assert await Retention(database).prune_usage(None) == 0
    assert await count(database, usage) == 80
    assert await Retention(database).prune_usage(timedelta(days=2)) == 32
    assert await count(database, usage) == 48
    assert await count(database, usage_daily) == 80


async def test_sums_by_end_user_are_removed_with_the_rows_of_their_days(database: Database, monkeypatch: Any):
    monkeypatch.setattr(retention, "AT_ONCE", 7)
    today = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
    rows = [row(f"r{i}", created_at=today - timedelta(hours=i), end_user=f"u{i}") for i in range(80)]
    await UsageWriter(database).write(rows)
    of = Retention(database)
    for remove, oldest in (
        (lambda: of.prune_usage(None), 4),
        (lambda: of.remove_usage(today - timedelta(hours=60), 1000), 3),
        (lambda: of.prune_usage(NOW - today + timedelta(hours=36)), 2),
    ):
        await remove()
        since = today - timedelta(days=oldest)
        async with database.read() as connection:
            for table in (usage_end_users, usage_end_user_days):
                assert min((await connection.execute(select(table.c.day))).scalars()) == since
        # A day of which only some rows are removed keeps its sums, so its report stays whole.
        page = await UsageReport(database).page(("end_user",), since=since, until=since + timedelta(days=1))
        assert page.total["requests"] == await count(database, usage_daily, usage_daily.c["day"] == since) > 0


async def test_no_sum_by_end_user_is_left_by_removals_that_stop(database: Database, monkeypatch: Any):
    """Each run removes at most ten rows of a table; a day of which sums are removed never counts as complete."""
    monkeypatch.setattr(retention, "AT_ONCE", 5)
    monkeypatch.setattr(retention, "MAX_REMOVED", 10)
    today = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
    made = [row(f"r{i}", created_at=today - timedelta(days=i % 3), end_user=f"u{i}") for i in range(75)]
    await UsageWriter(database).write(made)
    first = today - timedelta(days=1)
    for _ in range(20):
        await Retention(database).prune_usage(datetime.now(UTC) - first)
        async with database.read() as connection:
            left = list((await connection.execute(select(usage_end_users.c.day))).scalars())
            complete = set((await connection.execute(select(usage_end_user_days.c.day))).scalars())
        assert all(left.count(day) == 25 for day in complete)
    assert sorted(set(left)) == sorted(complete) == [first, today]


async def test_old_sums_by_hour_and_day_are_removed_only_if_asked(database: Database, monkeypatch: Any):
    """Sums of a day are removed as a whole, and none is rebuilt from rows."""
    monkeypatch.setattr(retention, "AT_ONCE", 7)
    today = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
    failed = {"status": "error", "error_code": "engine_error"}
    made = [row(f"r{i}", created_at=today - timedelta(hours=i), end_user=f"u{i}", **failed) for i in range(80)]
    await UsageWriter(database).write(made)
    of, first = Retention(database), today - timedelta(days=2)
    kept = datetime.now(UTC) - first - timedelta(hours=1)
    hour, day, counts, users = ACTIVITY[3600], ACTIVITY[86400], refusal_counts, usage_end_users
    sums = (
        (usage_daily,),
        (usage_hourly,),
        *((table, table.c.kind == ENGINE) for table in (hour, day)),
        *((counts, counts.c.level == level, counts.c.tenant_id == "t1") for level in (3600, 86400)),
        (users,),
    )
    assert await of.prune_sums(None) == 0
    assert await of.prune_sums(kept) == 0, "rows of these days are left"
    assert [await count(database, *which) for which in sums] == [80] * len(sums)
    await of.prune_usage(kept)
    assert await of.prune_sums(kept) > 0
    left = sum(each.created_at >= first for each in made)
    assert [await count(database, *which) for which in sums] == [left] * len(sums) == [49] * len(sums)
    assert await ActivityRebuild(database, timedelta(hours=48)).run() == 0
    assert await of.prune_sums(kept) == 0


async def test_a_removal_of_sums_that_stops_goes_on_with_the_oldest_day(database: Database, monkeypatch: Any):
    """Each run removes at most ten rows of a table, so at most one day is incomplete."""
    today = NOW.replace(hour=0, minute=0, second=0, microsecond=0)
    days = [today - timedelta(days=i % 4) for i in range(60)]
    made = [row(f"r{i}", created_at=at, model=f"m{i}", end_user=f"u{i}") for i, at in enumerate(days)]
    await UsageWriter(database).write(made)
    first = today - timedelta(days=1)
    await Retention(database).remove_usage(first, len(made))
    monkeypatch.setattr(retention, "AT_ONCE", 5)
    monkeypatch.setattr(retention, "MAX_REMOVED", 10)
    for _ in range(10):
        await Retention(database).prune_sums(datetime.now(UTC) - first)
        async with database.read() as connection:
            left = list((await connection.execute(select(usage_daily.c.day))).scalars())
        assert sum(0 < left.count(first - timedelta(days=i)) < 15 for i in (1, 2)) <= 1
    assert sorted(set(left)) == [first, today]
    for table in (usage_daily, usage_hourly, usage_end_users):
        assert await count(database, table) == 30


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"sums_days": 92.0, "usage_days": 90.0}, "LORAPLEX_SUMS_DAYS: expected at least 93 days"),
        ({"sums_days": 400.0}, "LORAPLEX_SUMS_DAYS: expected together with LORAPLEX_USAGE_DAYS"),
        ({"sums_days": 100.0, "usage_days": 101.0}, "LORAPLEX_SUMS_DAYS: .*at least as many days"),
    ],
)
def test_sums_are_kept_for_as_long_as_they_are_read_or_rebuilt(
    given: dict[str, float], error: str, tmp_path: Path, model_dir: Path
):
    with pytest.raises(SettingsError, match=error):
        settings(tmp_path, model_dir, ["http://127.0.0.1:1"], "redis://r", **given)
    assert settings(tmp_path, model_dir, ["http://127.0.0.1:1"], "redis://r", sums_days=93, usage_days=93).sums_days


async def test_the_hourly_chores_remove_old_sums(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, starts_servers: None
):
    monkeypatch.setattr(housekeeping, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(housekeeping, "HOUSEKEEPING_KEY", f"test:{tmp_path}")
    of = settings(tmp_path, model_dir, ["http://127.0.0.1:1"], redis_url, sums_days=93, usage_days=90)
    database = Database(of.database_url)
    try:
        await UsageWriter(database).write([row(f"r{i}", created_at=NOW - timedelta(days=i)) for i in (1, 92, 95)])
        async with running(of):

            async def is_pruned() -> bool:
                return await count(database, usage_daily) == 2

            await until(is_pruned)
        assert await count(database, usage) == 1
    finally:
        await database.close()
