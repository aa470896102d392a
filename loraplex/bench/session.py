"""A whole benchmark: the baseline, the measured runs, the generator's overhead, and the report of them."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loraplex.bench.access import KeyRefused, list_models
from loraplex.bench.live import show
from loraplex.bench.load import Load
from loraplex.bench.overhead import measure_overhead
from loraplex.bench.report import make_report, run_report
from loraplex.bench.run import Run, Server, connect, measure, shown_url
from loraplex.bench.scenario import Scenario
from loraplex.bench.trace import write_trace
from loraplex.bench.weights import compare_weights

MAX_FILES = 65_536
MakeLoad = Callable[[Server], Awaitable[Load]]


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A benchmark to run.

    baseline: tenants left out of the run before the measured ones. repeat: measured runs. trace_out: file for the
    planned requests of open loops. admin_key: an operator's key of the server, which tells the tenants' weights.
    rate_scale: factor that the scenario's rates already have.
    """

    url: str
    make_load: MakeLoad
    name: str
    description: str = ""
    baseline: Sequence[str] = ()
    repeat: int = 1
    with_overhead: bool = True
    internal_token: str | None = None
    trace_out: Path | None = None
    admin_key: str | None = field(default=None, repr=False)
    rate_scale: float = 1.0


def fixed(load: Load) -> MakeLoad:
    """Return a function that makes a load independently of the server's models."""

    async def make(server: Server) -> Load:
        return load

    return make


def of_scenario(scenario: Scenario, keys: Mapping[str, str | None], seed: int | None) -> MakeLoad:
    """Return a function that makes the scenario's load from the server's list of models."""

    async def make(server: Server) -> Load:
        try:
            access = await list_models(server, keys)
        except KeyRefused as error:
            scenario.fail_without_key(error.tenant, str(error))
        return scenario.load(access, seed)

    return make


def run_benchmark(bench_run: BenchRun) -> dict[str, Any]:
    """Run a benchmark to its end and return the report. Ctrl-C ends the run; the report has what was measured."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    _raise_file_limit()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(benchmark(bench_run))


def _raise_file_limit() -> None:
    """Allow a connection for each request in flight; the usual soft limit is 1,024 open files."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def benchmark(bench_run: BenchRun) -> dict[str, Any]:
    """Run a benchmark and return its report. Raises BenchError, ScenarioError."""
    stop = asyncio.Event()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    async with connect(bench_run.url, bench_run.internal_token) as server:
        load = await bench_run.make_load(server)
        weights, warning = await compare_weights(server, load, bench_run.admin_key)
        if bench_run.trace_out:
            write_trace(bench_run.trace_out, load.rows())
        _stop_on_interrupt(stop)
        baseline = None
        if bench_run.baseline:
            alone = replace(load.without(bench_run.baseline), round=-1)
            baseline = run_report(await _one(server, alone, stop, "baseline"))
        runs: list[dict[str, Any]] = []
        last = Run(load)
        while len(runs) < bench_run.repeat and not stop.is_set():
            # Prompts of a repeated run are not in the server's prefix cache; times, models and lengths are the same.
            last = await _one(
                server, replace(load, round=len(runs)), stop, f"run {len(runs) + 1} of {bench_run.repeat}"
            )
            runs.append(run_report(last))
    overhead = None
    if bench_run.with_overhead and not stop.is_set():
        rate = len(last.samples) / last.seconds if last.seconds else 0.0
        overhead = await measure_overhead(load.api, rate, last.samples)
    about = {
        "loraplex": version("loraplex"),
        "started": started,
        "name": bench_run.name,
        "description": bench_run.description,
        "overhead": overhead,
        "rate_scale": bench_run.rate_scale,
        "server_weights": weights,
    }
    report = make_report(shown_url(bench_run.url), load, runs, baseline, **about)
    return report | {"warnings": [*report["warnings"], *([warning] if warning else [])]}


async def _one(server: Server, load: Load, stop: asyncio.Event, title: str) -> Run:
    run = Run(load)
    progress = asyncio.create_task(show(run, title))
    try:
        await measure(server, load, run, stop)
    finally:
        progress.cancel()
        with suppress(asyncio.CancelledError):
            await progress
    return run


def _stop_on_interrupt(stop: asyncio.Event) -> None:
    """Let the first Ctrl-C set `stop`; the second one interrupts at once."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    # Outside of the main thread there are no signals to handle.
    with suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, interrupted)
