"""The host's share of a step, on a simulated device (`--device simulated:STEP_MS,MS_PER_TOKEN`).

    python -m benchmarks.host_share [--seconds 8] [--engine-core-mode process,thread] [--only TEXT] [--json FILE]
                                    [--profile] [--fronts 4] [-- ENGINE FLAGS]

Measures, without a server, the CPU time of the engine's core per step. Then it starts a `loraplex engine` in each mode
of its core, streams from it over HTTP, and measures the CPU time of the HTTP front per streamed token, the share of the
device's rate that 64 streams reach, and the time to the first token of a long prompt beside 8 streams; and on the CPU
itself, the rate of 1 and 16 streams. Figures are CPU times where possible. Run nothing else on the machine at the same
time.

A further measure is for a core that has a CPU of its own: its process is pinned to CPU 0, the front and the client to
CPU 1, and beside them `--fronts` processes that do a front's work without a pause (JSON, SSE events, UTF-8).
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from benchmarks.sweep import make_adapters
from engine.build import DTYPES
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from loraplex.models import ensure_demo_model
from testing.ports import free_port

NUM_ADAPTERS, RANK = 8, 8
PROMPT, LONG_PROMPT = 200, 4000
# The simulated device has no memory, so the cache may be as large as the scheduler's lists allow.
MEMORY: dict[str, Any] = {"kv_cache_memory": 16 << 30, "adapter_memory": 1 << 30}
# A decode step of an 8B model on an H200: 4.5 ms, 20 us for each prompt token.
DECODE_MS, TOKEN_MS = 4.5, 0.02
# The same with streams that end, of the number of streams.
CHANGING_MS = {64: 4.5, 256: 7.5}
# Steps so slow that the front sends each token in an event of its own.
CALM_MS = 25
# Fixed cost of a step with prompt tokens that is launched kernel by kernel.
EAGER_MS = 10

Figures = dict[str, float]


def core_steps(
    model: Path,
    adapters: list[Path],
    streams: int,
    steps: int,
    profile: bool,
    lengths: range = range(4000, 4001),
    step_ms: float = 0.0,
) -> Figures:
    """Measure steps of `streams` requests in an engine without a server. Another request follows each one's end.

    lengths: their output tokens, drawn at random. step_ms: duration of a step of the device. Above 0, steps are planned
    as late as the served engine plans them, and a figure is the share of the time in which the device computed.
    """
    host = HostCache(None, BaseShape.from_config_dir(model), 1 << 30, DTYPES["bfloat16"])
    config = EngineConfig(
        model=str(model), device=f"simulated:{step_ms},0", max_num_seqs=streams, max_num_batched_tokens=8192, **MEMORY
    )
    engine = Engine(config, host)
    digests = [host.add_path(path) for path in adapters]
    draw, numbers = random.Random(1), count()

    def fill() -> None:
        while len(engine.scheduler.requests) < streams:
            i = next(numbers)
            prompt = [(31 * i + 7 * j) % 40000 + 10 for j in range(PROMPT)]
            params = SamplingParams(max_tokens=draw.choice(lengths), ignore_eos=True, seed=1)
            digest = digests[i % len(digests)]
            engine.add_request(NewRequest(str(i), prompt, params, digest, tenant_id=f"tenant-{i % 4}"))

    fill()
    while not all(request.is_decoding for request in engine.scheduler.requests.values()):
        engine.step()
        if engine.is_waiting_for_adapters:
            time.sleep(0.001)
    # Short ones may have ended while an adapter was copied.
    times, started = [], time.perf_counter()
    with profiled(profile):
        for _ in range(steps):
            fill()
            while (spare := engine.spare_seconds) > 0:
                time.sleep(min(spare, 0.002))
            began = time.thread_time()
            engine.step()
            times.append(1e3 * (time.thread_time() - began))
    of_the_device = steps * step_ms / 1e3 / (time.perf_counter() - started)
    engine.close()
    host.close()
    ordered = sorted(times)
    return {
        "ms_per_step": statistics.mean(times),
        "median": statistics.median(times),
        "p10": ordered[len(times) // 10],
        "p99": ordered[int(0.99 * len(times))],
    } | ({"of_the_device": of_the_device} if step_ms else {})


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    """Profile the block and print the result, if wanted."""
    if not wanted:
        yield
        return
    import cProfile
    import pstats

    profile = cProfile.Profile()
    with profile:
        yield
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


class ServedEngine:
    """A `loraplex engine` process. Its front is the event loop's thread."""

    def __init__(
        self, model: Path, adapters: list[Path], device: str, flags: list[str], start_seconds: float = 120
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open while the engine runs
        command = [sys.executable, "-m", "loraplex.cli", "engine", "--model", str(model), "--served-model-name", "base"]
        command += ["--port", str(self.port), "--device", device]
        command += flags
        for i, path in enumerate(adapters):
            command += ["--lora-modules", f"adapter-{i}={path}"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self._root = psutil.Process(self._process.pid)
        deadline = time.monotonic() + start_seconds
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise RuntimeError(self._log.read().decode())
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=1).status == 200
        except OSError:
            return False

    def state(self) -> dict[str, Any]:
        return json.load(urllib.request.urlopen(f"{self.url}/state", timeout=10))

    def cpu(self) -> tuple[float, float, float]:
        """Return seconds of CPU: the front's, the system calls' part of it, and all else, also of a core's process."""
        threads = {t.id: t for t in self._root.threads()}
        front = threads.pop(self._root.pid)
        rest = sum(thread.user_time + thread.system_time for thread in threads.values())
        for times in (child.cpu_times() for child in self._root.children()):
            rest += times.user + times.system
        return front.user_time + front.system_time, front.system_time, rest

    @property
    def front(self) -> psutil.Process:
        return self._root

    def core_processes(self) -> list[psutil.Process]:
        """Return the core's process, if it has one of its own."""
        return self._root.children()

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


class Stream(asyncio.Protocol):
    """A streamed completion over a raw socket, which costs the client little. first: arrival of the first event."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.sent = time.perf_counter()
        self.first: float | None = None
        self.head = b""
        self.has_first = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first is None:
            self.head += data
            if b"data: " in self.head:
                self.first = time.perf_counter()
                self.has_first.set()


async def open_stream(port: int, number: int, num_prompt_tokens: int, max_tokens: int, adapters: int) -> Stream:
    body = {
        "model": f"adapter-{number % adapters}", "stream": True, "max_tokens": max_tokens, "ignore_eos": True,
        "prompt": [(31 * number + 7 * j) % 40000 + 10 for j in range(num_prompt_tokens)], "seed": number,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    _, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(head + data), "127.0.0.1", port)
    return stream


@asynccontextmanager
async def streams(engine: ServedEngine, number: int) -> AsyncIterator[None]:
    """Keep streams open during the block, which begins once all of them decode."""
    opened = [await open_stream(engine.port, i, PROMPT, 6000, NUM_ADAPTERS) for i in range(number)]
    for stream in opened:
        await stream.has_first.wait()
    try:
        yield
    finally:
        for stream in opened:
            stream.transport.abort()


async def rate(engine: ServedEngine, number: int, seconds: float) -> Figures:
    """Measure `number` streams: tokens per second, and CPU time per token."""
    async with streams(engine, number):
        await asyncio.sleep(1)
        state, cpu, began = await asyncio.to_thread(engine.state), engine.cpu(), time.perf_counter()
        await asyncio.sleep(seconds)
        after, cpu_after, ended = await asyncio.to_thread(engine.state), engine.cpu(), time.perf_counter()
    tokens, steps = (after[key] - state[key] for key in ("generated_tokens", "steps"))
    front, system, core = (b - a for a, b in zip(cpu, cpu_after, strict=True))
    return {
        "tokens_per_s": tokens / (ended - began),
        "front_us_per_token": 1e6 * front / tokens,
        "of_it_system": 1e6 * system / tokens,
        "core_ms_per_step": 1e3 * core / steps,
    }


async def first_tokens(engine: ServedEngine, repeats: int) -> Figures:
    """Measure the time to the first token of a long prompt beside 8 streams."""
    async with streams(engine, 8):
        found = []
        for i in range(repeats):
            stream = await open_stream(engine.port, 1000 + i, LONG_PROMPT, 1, NUM_ADAPTERS)
            await stream.has_first.wait()
            found.append((stream.first or 0.0) - stream.sent)
            stream.transport.abort()
            await asyncio.sleep(0.2)
    return {"median_s": statistics.median(found), "worst_s": max(found)}


def work_as_a_front() -> None:
    """Do the work of a front for ever: decode outputs, encode events."""
    event = {"id": "cmpl-0", "object": "text_completion", "model": "base", "choices": [{"index": 0, "text": "é a"}]}
    while True:
        for _ in range(64):
            json.loads(f"data: {json.dumps(event)}\n\n".encode().decode()[6:])


@contextmanager
def beside_fronts(engine: ServedEngine, number: int) -> Iterator[None]:
    """Pin the engine's core to CPU 0, its front, this process and `number` busy processes to CPU 1. Raises RuntimeError
    without two CPUs, or if the core has no process of its own.
    """
    usable = os.sched_getaffinity(0)
    if not {0, 1} <= usable:
        raise RuntimeError(f"expected the CPUs 0 and 1, this process may use {sorted(usable)}")
    cores = engine.core_processes()
    if not cores:
        raise RuntimeError("expected a core in a process of its own (--engine-core-mode process)")
    _pin([engine.front], {1})
    _pin(cores, {0})
    os.sched_setaffinity(0, {1})
    fronts = [multiprocessing.get_context("spawn").Process(target=work_as_a_front, daemon=True) for _ in range(number)]
    for front in fronts:
        front.start()  # inherits this process's CPU
    try:
        yield
    finally:
        for front in fronts:
            front.kill()
            front.join()
        os.sched_setaffinity(0, usable)


def _pin(processes: list[psutil.Process], cpus: set[int]) -> None:
    """Pin all threads of the processes."""
    for process in processes:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cpus)


async def rate_beside_fronts(engine: ServedEngine, seconds: float, fronts: int) -> Figures:
    """Measure 64 streams while other fronts use the second CPU."""
    with beside_fronts(engine, fronts):
        found = await rate(engine, 64, seconds)
    return found | {"of_the_device": found["tokens_per_s"] * DECODE_MS / 64e3}


def served(
    model: Path,
    adapters: list[Path],
    flags: list[str],
    modes: list[str],
    seconds: float,
    only: str,
    fronts: int,
) -> Iterator[tuple[str, Figures]]:
    """Yield each measure's name and figures, in each mode of the core."""

    def streams_of(number: int) -> Callable[[ServedEngine], Any]:
        return lambda engine: rate(engine, number, seconds)

    measures: list[tuple[str, str, Callable[[ServedEngine], Any]]] = [
        ("64 streams, a step every 25 ms", f"simulated:{CALM_MS},0", streams_of(64)),
        ("64 streams, a step every 4.5 ms", f"simulated:{DECODE_MS},0", streams_of(64)),
        ("256 streams, a step every 25 ms", f"simulated:{CALM_MS},0", streams_of(256)),
        (
            "first token of 4,000 beside 8 streams",
            f"simulated:{DECODE_MS},{TOKEN_MS},{EAGER_MS}",
            lambda e: first_tokens(e, 7),
        ),
        ("CPU, 16 streams", "cpu", streams_of(16)),
        ("CPU, 1 stream", "cpu", streams_of(1)),
    ]
    alone = f"64 streams, a step every 4.5 ms, {fronts} fronts' load on the other CPU"
    measures.append((alone, f"simulated:{DECODE_MS},0", lambda e: rate_beside_fronts(e, seconds, fronts)))
    for name, device, measure in measures:
        for mode in modes if only in name else ():
            if name == alone and mode != "process":
                continue
            memory = 1 << 30 if device == "cpu" else MEMORY["kv_cache_memory"]
            with ExitStack() as stack:
                engine = ServedEngine(
                    model,
                    adapters,
                    device,
                    ["--engine-core-mode", mode, "--kv-cache-memory", str(memory), "--max-num-seqs", "256", *flags],
                )
                stack.callback(engine.close)
                yield f"{name}, {mode}", asyncio.run(measure(engine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--engine-core-mode", "--core", default="process,thread", help="modes of the core, in turn")
    parser.add_argument("--only", default="", help="measure only what has this text in its name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fronts", type=int, default=4, help="busy processes beside the front")
    parser.add_argument("--profile", action="store_true", help="show where the core's time goes, and stop")
    parser.add_argument("flags", nargs="*", help="flags of the served engine")
    flags = parser.parse_args()
    model = flags.model or ensure_demo_model(Path(os.environ.get("LORAPLEX_TEST_CACHE", ".loraplex-test")) / "models")
    found: dict[str, Figures] = {}

    def show(name: str, figures: Figures) -> None:
        found[name] = figures
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(BaseShape.from_config_dir(model), Path(folder), NUM_ADAPTERS, RANK)
        for number in (64, 256):
            if flags.only not in f"core, {number} streams":
                continue
            steps = 300 if flags.profile else 1500
            show(f"core, {number} streams", core_steps(model, adapters, number, steps, flags.profile))
            if not flags.profile:
                for step_ms in (0.0, CHANGING_MS[number]):
                    changing = core_steps(model, adapters, number, steps, False, range(100, 500), step_ms)
                    show(f"core, {number} streams that end after 100 to 500 tokens, {step_ms} ms a step", changing)
        if not flags.profile:
            modes = flags.engine_core_mode.split(",")
            measured = served(model, adapters, flags.flags, modes, flags.seconds, flags.only, flags.fronts)
            for name, figures in measured:
                show(name, figures)
    if flags.json is not None:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
