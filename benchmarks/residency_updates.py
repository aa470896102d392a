"""Delay until every worker of a gateway records an engine's new adapter: pushed, and polled every second.

    python -m benchmarks.residency_updates [--rounds 40] [--workers 4]

A real engine of two random layers and one registry per worker, each with its own connections, like the gateway's
workers. Each round requests an adapter that the engine does not hold. Times are in ms, from this request to the last
registry's update, so they include the load and the first token.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from aiohttp import ClientSession

from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from benchmarks.routing_engines import start_engine
from gateway.fleet.discovery.health_checks import HealthChecks
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import Address, EngineRecord
from testing.gateway.bases import only
from testing.gateway.kinds import kinds_of
from testing.gateway.running import BASE_MODEL
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.tiny import save_adapter, save_model

START_SECONDS, KNOWN_SECONDS = 60.0, 10.0
LOOK_SECONDS = 0.0005


class Polls(HealthChecks):
    """Checks without following, as the gateway does for engines that push nothing."""

    async def follow(self, engine: EngineRecord, changed: Callable[[], None]) -> bool:
        return False


async def until_all(registries: list[Registry], true_of: Callable[[Registry], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not all(map(true_of, registries)):  # noqa: ASYNC110 - measures when the change is visible
            await asyncio.sleep(LOOK_SECONDS)


async def bring(client: ClientSession, url: str, digest: str, registries: list[Registry]) -> float:
    """Make the engine load an adapter; return the milliseconds until all registries have it."""
    body = {"model": f"sha256:{digest}", "prompt": "hi", "max_tokens": 1}
    assert not any(registry.engines[0].holds(digest) for registry in registries)
    sent = time.perf_counter()
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await until_all(registries, lambda registry: registry.engines[0].holds(digest), KNOWN_SECONDS)
    return 1000 * (time.perf_counter() - sent)


async def measure(url: str, digests: list[str], workers: int, *, pushed: bool) -> list[float]:
    async with AsyncExitStack() as stack:
        registries = []

        async def listed() -> list[Address]:
            return [Address(url)]

        for _ in range(workers):
            session = await stack.enter_async_context(ClientSession())
            checks = (HealthChecks if pushed else Polls)(session, kinds_of(session), only(BASE_MODEL))
            registry = Registry(listed, checks)
            task = asyncio.create_task(registry.watch(lambda: None))
            stack.callback(task.cancel)
            registries.append(registry)
            # Workers do not start at the same moment.
            await asyncio.sleep(random.random() / workers)
        await until_all(registries, lambda registry: bool(registry.up), START_SECONDS)
        client = await stack.enter_async_context(ClientSession(headers={"x-loraplex-internal-token": TOKEN}))
        times = []
        for digest in digests:
            await asyncio.sleep(random.uniform(0.1, 1.1))
            times.append(await bring(client, url, digest, registries))
        return times


async def started(url: str) -> None:
    async with ClientSession() as session, asyncio.timeout(START_SECONDS):
        while True:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    flags = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(folder / "model")
        store = DirectoryStore(folder / "store")
        base = BaseShape.from_config_dir(folder / "model")
        digests = []
        for number in range(2 * flags.rounds):
            save_adapter(folder / f"adapter-{number}", seed=number)
            digests.append(store.put(folder / f"adapter-{number}", base).digest)
        url = start_engine(folder / "model", folder / "store", free_port(), stack)
        asyncio.run(started(url))
        print("| | p50 | max |\n|---|---|---|")
        for name, pushed in (("asked every second", False), ("pushed", True)):
            mine, digests = digests[: flags.rounds], digests[flags.rounds :]
            times = asyncio.run(measure(url, mine, flags.workers, pushed=pushed))
            print(f"| {name} | {statistics.median(times):.0f} ms | {max(times):.0f} ms |", flush=True)


if __name__ == "__main__":
    main()
