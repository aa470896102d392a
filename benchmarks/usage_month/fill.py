"""Filling of the usage tables with a made-up month, and of the sums that the ledger would have written."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select

from benchmarks.usage_month.fillers import Filler
from benchmarks.usage_month.rows import Encoder, Hour, Maker, hours_here, make_rows
from gateway.billing import activity_rebuild
from gateway.records.activity.tables import ACTIVITY
from gateway.records.requests.refusal_tables import refusal_counts, refused_requests
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage, usage_daily, usage_hourly
from gateway.records.usage.end_user_tables import SUMMED

# Days whose sums for charts are built at once on PostgreSQL.
DAYS_AT_ONCE = 2
Hours = Callable[[int, Maker, Encoder], AsyncIterator[Hour]]


async def fill(
    url: str, filler: Filler, rows: int, make: Maker = make_rows, hours: Hours = hours_here, *, is_told: bool = False
) -> None:
    """Fill the usage tables by the hour, then build the sums with the gateway's rebuild.

    Indexes are built after the rows, which takes a fraction of the time. is_told: print how long each part took.
    """
    began = time.perf_counter()

    def tell(what: str) -> None:
        if is_told:
            print(f"{time.perf_counter() - began:7.0f} s: {what}", flush=True)

    await filler.begin()
    indexes = await filler.drop_indexes(usage, refused_requests, usage_hourly, usage_daily)
    failures: Counter[tuple[Any, ...]] = Counter()
    async for hour in hours(rows, make, filler.encode):
        await filler.write_encoded(usage, hour.rows)
        await filler.write_encoded(refused_requests, hour.refused)
        failures.update(hour.failures)
    await filler.write(refusal_counts, [(*key, number) for key, number in failures.items()])
    tell("the rows are written")
    hours_of, days_of = filler.start_of("hour", "created_at"), filler.start_of("day", "hour")
    sums = (
        reports_from(hours_of, "usage", "hour", "count(*)", "usage_hourly"),
        reports_from(days_of, "usage_hourly", "day", "sum(requests)", "usage_daily"),
    )
    await filler.execute_beside(sums, list(end_users_from(filler.start_of("day", "created_at"))))
    tell("the sums for reports are written")
    await filler.execute_beside(*([statement] for statement in indexes))
    tell("the indexes are built")
    indexes = await filler.drop_indexes(*ACTIVITY.values())
    await filler.settle()
    await build_charts(url)
    tell("the sums for charts are written")
    await filler.execute_beside(*([statement] for statement in indexes))
    await filler.close()
    tell("the tables are analysed")


async def build_charts(url: str) -> None:
    """Write the sums for charts with the gateway's rebuild."""
    activity_rebuild.PAUSE_SECONDS = 0.0
    database = Database(url, statement_seconds=None)
    rebuild = activity_rebuild.ActivityRebuild(database, timedelta(hours=48))
    if database.dialect == "postgresql":
        async with database.read() as connection:
            days = list((await connection.execute(select(usage_daily.c["day"]).distinct())).scalars())
        await asyncio.gather(*(_build_days(rebuild, days) for _ in range(DAYS_AT_ONCE)))
    await rebuild.run()
    await database.close()


async def _build_days(rebuild: activity_rebuild.ActivityRebuild, days: list[datetime]) -> None:
    while days:
        await rebuild._check(days.pop())


def reports_from(start: str, source: str, period: str, requests: str, table: str) -> str:
    keys = f"tenant_id, {start}, key_id, model"
    summed = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost", "surcharge")
    sums = ", ".join(f"sum({name})" for name in summed)
    return (
        f"INSERT INTO {table} (tenant_id, {period}, key_id, model, tenant, requests, {', '.join(summed)}) "
        f"SELECT {keys}, min(tenant), {requests}, {sums} FROM {source} GROUP BY {keys}"
    )


def end_users_from(day: str, rows: str = "usage") -> Iterator[str]:
    """Yield the statements that fill the tables of sums by end user. day: SQL of the day of a usage row in `rows`."""
    keys, names = f"{day}, tenant_id, coalesce(end_user, '')", ", ".join(SUMMED)
    sums = ", ".join(f"sum({name})" for name in SUMMED[1:])
    yield (
        f"INSERT INTO usage_end_users (day, tenant_id, end_user, tenant, {names}) "
        f"SELECT {keys}, min(tenant), count(*), {sums} FROM {rows} GROUP BY {keys}"
    )
    most = ", ".join(f"most_{name}" for name in SUMMED)
    yield (
        f"INSERT INTO usage_end_user_days (day, tenant_id, end_users, requests, {most}) "
        f"SELECT day, tenant_id, count(*), sum(requests), {', '.join(f'max({name})' for name in SUMMED)} "
        "FROM usage_end_users GROUP BY day, tenant_id"
    )
