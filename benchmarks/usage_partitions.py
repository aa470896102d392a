"""The usage table on PostgreSQL as one table or with monthly partitions: fill, inserts, dashboard queries, removal.

python -m benchmarks.usage_partitions --rows 200000 --months 12 --partitioned
python -m benchmarks.usage_partitions --rows 200000 --months 12
python -m benchmarks.usage_partitions --rows 100000000 --months 12 --partitioned --folder PG --only-fill
python -m benchmarks.usage_partitions --rows 100000000 --months 12 --partitioned --folder PG

PostgreSQL makes the rows itself, day by day in the order of their times, with the popularities of
benchmarks/dashboard_data.py; indexes are built after the rows. Ids are as gateways make them: random in one table, with
their time on partitions. Only the last 31 days have sums, because no query asks for more. Before it fills, the command
prints the space that it needs, and stops if the folder lacks it. It measures transactions of the ledger's writer with
new rows and with known ones, requests by their ids, all queries of benchmarks/dashboard_data.py, and the removal of the
oldest month.
"""

import asyncio
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta
from typing import Any

import asyncpg
from msgspec.structs import replace

from benchmarks import dashboard_data as data
from benchmarks.usage_month.fill import end_users_from, reports_from
from benchmarks.usage_month.fillers import OnPostgresql
from benchmarks.usage_month.records import fill_owners
from benchmarks.usage_month.rows import ADAPTERS, ENGINES, NOW, TENANTS, make_rows
from gateway.billing import activity_rebuild
from gateway.billing.writer import UsageWriter
from gateway.records.maintenance.retention import Retention
from gateway.records.partitions.partitioning import partition
from gateway.records.partitions.partitions import first_id, next_month
from gateway.records.partitions.request_ids import RequestIds
from gateway.records.requests.log import RequestLog
from gateway.records.sql.database import Database, upgrade
from gateway.usage_row import UsageRow
from testing.gateway.partitions import end_first

# Bytes of disk for a row, its indexes and the sums of a month in twelve; and for the server's log and sorting. With
# 200,000 rows a row has 362 bytes, and its indexes 196.
ROW_BYTES, SPARE_BYTES = 600, 6 << 30
BATCH, BATCHES = 500, 40
# Maximum number of rows that are removed one by one.
REMOVED = 100_000
COLUMNS = {
    "tenant_id": "lpad(tenant::text, 32, '0')",
    "tenant": "'tenant-' || tenant",
    "key_id": "lpad(tenant::text, 16, '0')",
    "endpoint": "'chat.completions'",
    "model": "CASE WHEN adapter = 1 THEN 'base' ELSE 'adapter-' || adapter END",
    "adapter_digest": "CASE WHEN adapter > 1 THEN repeat('d', 64) END",
    "engine": f"'http://engine-' || (tenant + adapter) % {ENGINES} || ':8000'",
    "prompt_tokens": "floor(1000 * random())",
    "completion_tokens": "floor(300 * random())",
    "cached_tokens": "0",
    "cost": "floor(10000 * random())",
    "latency_ms": "ttft + floor(4000 * random())",
    "ttft_ms": "ttft",
    "status": "CASE fate WHEN 96 THEN 'cancelled' WHEN 97 THEN 'error' WHEN 98 THEN 'error' WHEN 99 THEN 'limited' "
    "ELSE 'ok' END",
    "finish_reason": "'stop'",
    "created_at": "at",
    "version": "CASE WHEN adapter > 1 THEN 1 END",
    "admission_ms": "3",
    "queue_ms": "floor(40 * random())",
    "reserved_tokens": "800",
    "end_user": "'user-' || floor(500 * random())",
    "error_code": "CASE WHEN fate >= 99 THEN 'rate_limit_exceeded' WHEN fate >= 97 THEN 'engine_error' END",
}
RANDOM_ID = "'req_' || md5(random()::text || i)"
TIMED_ID = "'req_g' || to_char(at AT TIME ZONE 'UTC', 'YYYYMMDDHH24MISS') || left(md5(random()::text || i), 17)"
INDEXES = {"ix_{}_tenant_id_created_at": "tenant_id, created_at", "ix_{}_tenant_created_at": "tenant, created_at"}
INDEXES |= {"ix_{}_created_at": "created_at"}


def insert_day(table: str, request_id: str, since: datetime, until: datetime, rows: int) -> str:
    """Return the statement that makes the rows of a day, in the order of their times."""
    seconds = (until - since).total_seconds() / rows
    return (
        f"INSERT INTO {table} (request_id, {', '.join(COLUMNS)}) "
        f"SELECT {request_id}, {', '.join(COLUMNS.values())} FROM (SELECT i, "
        f"timestamptz '{since.isoformat()}' + (i + random()) * interval '{seconds} s' AS at, "
        f"floor(power({TENANTS}, random()))::int AS tenant, floor(power({ADAPTERS + 1}, random()))::int AS "
        "adapter, floor(50 * power(2, 6 * random()))::int AS ttft, floor(100 * random())::int AS fate "
        f"FROM generate_series(0, {rows - 1}) AS i) AS made"
    )


def months_until_now(months: int) -> list[date]:
    """Return the first days of the last months, this one included, the oldest first."""
    found = [NOW.date().replace(day=1)]
    while len(found) < months:
        found.insert(0, (found[0] - timedelta(days=1)).replace(day=1))
    return found


def days(month: date) -> Iterator[tuple[datetime, datetime]]:
    """Yield the start and end of each day of a month, until now."""
    since, end = (datetime(each.year, each.month, 1, tzinfo=UTC) for each in (month, next_month(month)))
    end = min(end, NOW)
    while since < end:
        until = min(since + timedelta(days=1), end)
        yield since, until
        since = until


async def fill_rows(connection: Any, rows: int, months: int, *, partitioned: bool) -> None:
    """Fill `usage`, whose form is as given, with its indexes built after the rows."""
    every = months_until_now(months)
    start = datetime(every[0].year, every[0].month, 1, tzinfo=UTC)
    per_second = rows / (NOW - start).total_seconds()
    if not partitioned:
        await connection.execute("ALTER TABLE usage DROP CONSTRAINT pk_usage")
        await connection.execute("".join(f"DROP INDEX {name.format('usage')};" for name in INDEXES))
    for month in every:
        table = f"usage_{month:%Y%m}" if partitioned else "usage"
        if partitioned:
            await connection.execute(f"DROP TABLE IF EXISTS {table}; CREATE TABLE {table} (LIKE usage)")
            await connection.execute(f"ALTER TABLE {table} ALTER surcharge SET DEFAULT 0")
        for since, until in days(month):
            number = max(1, round(per_second * (until - since).total_seconds()))
            made = insert_day(table, TIMED_ID if partitioned else RANDOM_ID, since, until, number)
            await connection.execute(made)
        if partitioned:
            await build_indexes(connection, table)
            bounds = f"FROM ('{first_id(month)}') TO ('{first_id(next_month(month))}')"
            await connection.execute(f"ALTER TABLE usage ATTACH PARTITION {table} FOR VALUES {bounds}")
        print(f"rows of {month:%Y-%m} are made", flush=True)
    if not partitioned:
        await build_indexes(connection, "usage")


async def build_indexes(connection: Any, table: str) -> None:
    await connection.execute(f"ALTER TABLE {table} ADD CONSTRAINT pk_{table} PRIMARY KEY (request_id)")
    for name, columns in INDEXES.items():
        await connection.execute(f"CREATE INDEX {name.format(table)} ON {table} ({columns})")


async def fill_sums(url: str, connection: Any, months: int) -> None:
    """Write the sums of the last 31 days, those for charts by the gateway's rebuild."""
    first = datetime.combine(months_until_now(months)[0], datetime.min.time(), UTC)
    recent = max(first, (NOW - timedelta(days=31)).replace(hour=0, minute=0))
    view = f"CREATE TEMP VIEW part AS SELECT * FROM usage WHERE created_at >= '{recent.isoformat()}'"
    for statement in (
        view,
        reports_from("date_trunc('hour', created_at, 'UTC')", "part", "hour", "count(*)", "usage_hourly"),
        reports_from("date_trunc('day', hour, 'UTC')", "usage_hourly", "day", "sum(requests)", "usage_daily"),
        *end_users_from("date_trunc('day', created_at, 'UTC')", "part"),
    ):
        await connection.execute(statement)
    await fill_charts(url, connection)


async def fill_charts(url: str, connection: Any) -> None:
    """Write the sums for charts, and refused requests, of the rows of the view `part`."""
    database = Database(url, statement_seconds=None)
    activity_rebuild.PAUSE_SECONDS = 0.0
    await activity_rebuild.ActivityRebuild(database, timedelta(hours=48)).run()
    await database.close()
    await connection.execute(
        "INSERT INTO refused_requests (request_id, at, tenant_id, tenant, key_id, method, route, model, end_user, "
        "status, code, latency_ms) SELECT 'refused' || substr(request_id, 4), created_at, tenant_id, tenant, key_id, "
        "'POST', '/v1/chat/completions', model, end_user, 429, 'rate_limit_exceeded', 3 FROM part WHERE cost < 200"
    )


async def fill(url: str, rows: int, months: int, *, partitioned: bool) -> None:
    began = time.perf_counter()
    database = Database(url, statement_seconds=None)
    if partitioned:
        await partition(database, print)
        await end_first(database, months_until_now(months)[0])
    await database.close()
    connection = await asyncpg.connect(url)
    await connection.execute("SET synchronous_commit = off; SET maintenance_work_mem = '512MB'; SELECT setseed(0.5)")
    await connection.execute("SET work_mem = '256MB'; SET jit = off")
    await fill_rows(connection, rows, months, partitioned=partitioned)
    await fill_sums(url, connection, months)
    await fill_owners(OnPostgresql(connection))
    await connection.execute("VACUUM (FREEZE, ANALYZE)")
    await connection.close()
    print(f"{rows} rows filled in {time.perf_counter() - began:.0f} s", flush=True)


async def show_sizes(url: str) -> None:
    """Print the bytes of each kind of tables, and of a row."""
    connection = await asyncpg.connect(url)
    rows = await connection.fetchval("SELECT count(*) FROM usage")
    found = await connection.fetch(
        "SELECT CASE WHEN relname ~ '^usage(_\\d|_first|_default|$)' THEN 'usage' ELSE relname END AS name, "
        "sum(pg_table_size(oid))::float AS own, sum(pg_indexes_size(oid))::float AS indexes FROM pg_class "
        "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace GROUP BY 1 ORDER BY 2 DESC"
    )
    await connection.close()
    print(f"{'table':<22} {'MB':>9} {'indexes':>9} {'bytes a row':>12}")
    for name, own, indexes in found[:6]:
        print(f"{name:<22} {own / 1e6:9.1f} {indexes / 1e6:9.1f} {(own + indexes) / max(1, rows):12.1f}")
    total = sum(own + indexes for _, own, indexes in found)
    print(f"{'all':<22} {total / 1e6:9.1f} {'':>9} {total / max(1, rows):12.1f}", flush=True)


async def measure_inserts(url: str) -> None:
    """Measure the ledger's writer, one and four at once, with new rows and with rows that are there already."""
    database = Database(url)
    ids = RequestIds(database)
    await ids.look()
    chance, now = random.Random(time.time_ns()), datetime.now(UTC)

    def make() -> list[UsageRow]:
        hour = now.replace(minute=0, second=0, microsecond=0)
        return [replace(row, request_id=ids.new(), created_at=now) for row in make_rows(chance, hour, BATCH)]

    print(f"{'inserts of ' + str(BATCH) + ' rows':<34} {'median':>8} {'p95':>8} ms {'rows/s':>9}")
    for name, writers in (("one writer", 1), ("four writers", 4)):
        batches = [make() for _ in range(BATCHES)]
        for kind in ("new", "known"):
            began, times = time.perf_counter(), await _write_all(url, batches, writers)
            taken = time.perf_counter() - began
            high = sorted(times)[int(0.95 * len(times))]
            middle, speed = statistics.median(times), BATCH * BATCHES / taken
            print(f"{f'{name}, {kind} rows':<34} {middle:8.1f} {high:8.1f}    {speed:9.0f}", flush=True)
    await database.close()


async def _write_all(url: str, batches: list[list[UsageRow]], writers: int) -> list[float]:
    """Write batches with some writers, each with its own connections. Returns the time of each batch in ms."""
    left, times = list(batches), []

    async def write() -> None:
        database = Database(url)
        writer = UsageWriter(database)
        while left:
            batch = left.pop()
            began = time.perf_counter()
            await writer.write(batch)
            times.append(1000 * (time.perf_counter() - began))
        await database.close()

    await asyncio.gather(*(write() for _ in range(writers)))
    return times


async def measure_ids(url: str, months: int) -> None:
    """Measure the search of requests of all months by their ids."""
    chance, since = random.Random(5), datetime.combine(months_until_now(months)[0], datetime.min.time(), UTC)
    query = "SELECT request_id FROM usage WHERE created_at >= $1 ORDER BY created_at LIMIT 1"
    connection = await asyncpg.connect(url)
    ids = [await connection.fetchval(query, since + (NOW - since) * 0.9 * chance.random()) for _ in range(200)]
    await connection.close()
    database, times = Database(url), []
    for request_id in ids:
        began = time.perf_counter()
        assert await RequestLog(database).find(request_id) is not None
        times.append(1000 * (time.perf_counter() - began))
    await database.close()
    print(f"request by its id, any month: first {times[0]:.1f}, median {statistics.median(times):.2f} ms", flush=True)


async def measure_removal(url: str, months: int) -> None:
    """Remove the oldest month: a partition as a whole, or at most REMOVED rows of one table."""
    oldest = next_month(months_until_now(months)[0])
    before = datetime(oldest.year, oldest.month, 1, tzinfo=UTC)
    database = Database(url)
    retention = Retention(database)
    began = time.perf_counter()
    rows, _ = await retention.count_usage(before)
    counted = time.perf_counter()
    removed, _ = await retention.remove_usage(before, REMOVED)
    taken = time.perf_counter() - counted
    await database.close()
    found = f"{rows} rows counted in {counted - began:.1f} s"
    print(f"oldest month: {found}, {removed} removed in {taken:.1f} s", flush=True)


async def main() -> None:
    parser = data.parser_of(__doc__)
    parser.add_argument("--months", type=int, default=12, help="months of usage, this one included")
    parser.add_argument("--partitioned", action="store_true", help="with monthly partitions instead of one table")
    given = parser.parse_args()
    with ExitStack() as held:
        folder, is_new = data.folder_of(given.folder, held)
        needed, free = given.rows * ROW_BYTES + SPARE_BYTES, shutil.disk_usage(folder).free
        if is_new:
            print(f"{given.rows} rows of {ROW_BYTES} bytes need {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free")
            if needed > free:
                sys.exit("not enough space; give fewer --rows")
        url = held.enter_context(data.server_of(folder))
        await upgrade(url)
        if is_new:
            await fill(url, given.rows, given.months, partitioned=given.partitioned)
            (folder / "filled").write_text(f"{given.rows}\n")
        await show_sizes(url)
        if not given.only_fill:
            await measure_inserts(url)
            await measure_ids(url, given.months)
            await data.measure(url, given.name)
            await measure_removal(url, given.months)


if __name__ == "__main__":
    asyncio.run(main())
