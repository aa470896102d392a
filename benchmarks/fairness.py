"""Fairness between tenants through the whole service: our schedulers `fair` and `fcfs`, and vLLM, in one run.

    python -m benchmarks.fairness --repeat 3 --vllm VENV/bin/vllm --out docs/perf/2026-11-22-fairness
    python -m benchmarks.fairness --patterns all --repeat 3 --out docs/perf/2026-11-27-fairness-all
    python -m benchmarks.fairness --patterns flood --seconds 120 --repeat 3     (the start of a flood weighs less)
    python -m benchmarks.fairness --patterns all --device simulated:60,0.2 --out docs/perf/2026-11-27-fairness-simulated

Each pattern and each server begins with a new service, fair share and FCFS in turn, because the speed of a machine
drifts (docs/lab-notes.md). vLLM starts once in a round. The load is that of `loraplex bench --scenario`, from
`examples/scenarios/` in the forms of `fairness_patterns.py`, in their own length with --full. Loraplex runs as
`loraplex up` (gateway, Valkey, SQLite, engine), vLLM without a gateway or LoRA and with as many seats, and without the
patterns whose tenants have adapters. A round of all patterns takes about 11 minutes on two cores, without vLLM. Prints
Markdown tables: median (least to greatest) over the rounds. After each load, while the server is idle, the generator's
own overhead is measured against an echo server.
"""

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.against_vllm import serving, vllm, vllm_command
from benchmarks.fairness_adapters import push_adapters
from benchmarks.fairness_patterns import ALL, NAMES, Pattern, chosen, text_of
from benchmarks.hostile.place import of_stack
from benchmarks.plot import Bar, bar_chart
from benchmarks.report_file import run_facts
from loraplex.bench.isolation import wait_ratio
from loraplex.bench.metrics import wait_at
from loraplex.models import ensure_demo_model
from testing.ports import free_port
from testing.stack import CACHE, Stack, data_dir, loraplex

SCHEDULERS = ("fair", "fcfs")
VLLM = "vllm"
JAIN, SERVICE = "Jain's index", "service of all a second"
DIFFERENCE, GENERATOR = "largest difference of service in a window, of the mean", "load generator"
SEATS = 64
NO_LIMITS = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_concurrent": 10**4}
# Seconds beside the load for each service: its start and end, and the benchmark's own start and warm-up.
START_SECONDS = 15.0


@dataclass(frozen=True)
class Server:
    """A server under test. keys: each tenant's API key; empty for a server without tenants."""

    url: str
    model: str
    keys: dict[str, str]


@dataclass(frozen=True)
class Figure:
    """A figure of one run. value: infinite if it is the wait of a request without a first token."""

    name: str
    unit: str
    value: float | None


# The figures of each round, by pattern and server.
Results = dict[str, dict[str, list[list[Figure]]]]


@contextlib.contextmanager
def loraplex_server(scheduler: str, device: str, folder: Path, pattern: Pattern) -> Iterator[Server]:
    """Start the whole service, with the pattern's tenants, their weights and adapters, and no rate limits."""
    model = str(ensure_demo_model(CACHE))
    stack = Stack(data_dir(folder), "--model", model, "--engine-args", f"--scheduler {scheduler} --device {device}")
    try:
        place = of_stack(stack.wait_ready())
        tenants = pattern.spec()["tenants"]
        keys = {t["name"]: place.tenant(t["name"], weight=t.get("weight", 1.0), **NO_LIMITS) for t in tenants}
        if pattern.adapters:
            push_adapters(place.url, keys, pattern.adapters)
        yield Server(place.url, place.base_model, keys)
    finally:
        stack.stop()


@contextlib.contextmanager
def vllm_server(binary: Path) -> Iterator[Server]:
    port = free_port()
    command, environment = vllm(binary, ensure_demo_model(CACHE), {}, port, seats=SEATS)
    with serving(command, port, environment) as url:
        yield Server(url, "base", {})


def measure(pattern: Pattern, server: Server, folder: Path) -> dict[str, Any]:
    """Return the report of a pattern. Raises RuntimeError if the benchmark fails."""
    folder.mkdir(parents=True, exist_ok=True)
    file, out, known = (folder / f"{pattern.name}{end}" for end in (".toml", ".json", "-tenants.json"))
    file.write_text(text_of(pattern))
    flags = ["--scenario", file, "--json", out]
    if server.keys:
        tenants = [{"name": name, "api_key": key, "models": [server.model]} for name, key in server.keys.items()]
        known.write_text(json.dumps({"gateway": server.url, "tenants": tenants}))
        flags += ["--tenants", known]
    else:
        flags += ["--url", server.url]
    done = loraplex("bench", *map(str, flags), "--accept-errors", timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{pattern.name}: {done.stderr}")
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def figures(report: dict[str, Any]) -> list[Figure]:
    """Return the figures of a report's only run. Closed loops have shares, the other tenants times."""
    [run] = report["runs"]
    fairness = run["fairness"]
    found = []
    closed = {s["name"] for s in report["load"]["sources"] if s["arrival"]["kind"] == "closed"}
    for name, tenant in run["tenants"].items():
        if name not in closed:
            found += [Figure(f"{name}: TTFT p{p}", "s", wait_at(tenant, f"p{p}")) for p in (50, 99)]
            if report["baseline"] and name in report["baseline"]["tenants"]:
                ratio = wait_ratio(report["baseline"]["tenants"][name], tenant)
                found.append(Figure(f"{name}: p99 over p99 alone", "", ratio))
        if len(closed) > 1 or name not in closed:
            share = fairness["tenants"][name]["of_entitled"]
            found.append(Figure(f"{name}: of its share", "%", None if share is None else 100 * share))
        if tenant["failed"]:
            found.append(Figure(f"{name}: failed", "", tenant["failed"]))
    service = sum(tenant["service"] for tenant in fairness["tenants"].values())
    return [
        *found,
        Figure(JAIN, "", fairness["jain_entitled"]),
        Figure(SERVICE, "", service / fairness["until"]),
        *_difference(fairness),
        *_overhead(report["overhead"]),
    ]


def _difference(fairness: dict[str, Any]) -> list[Figure]:
    """Return the largest windowed difference of service between backlogged tenants, if two were ever backlogged."""
    difference = fairness["largest_difference"]
    return [] if difference is None else [Figure(DIFFERENCE, "%", 100 * difference["of_mean"])]


def _overhead(overhead: dict[str, Any] | None) -> list[Figure]:
    """Return what the generator adds to a time to first token, and its highest rate, against an echo server."""
    if overhead is None:
        return []
    added = [(p, overhead["ttft"][f"p{p}"]) for p in (50, 99)]
    return [
        *(Figure(f"{GENERATOR}: adds to a TTFT, p{p}", "ms", None if s is None else 1000 * s) for p, s in added),
        Figure(f"{GENERATOR}: most requests a second", "", overhead["max_requests_per_second"]),
    ]


def table(scenario: str, rounds: dict[str, list[list[Figure]]]) -> str:
    """Return a Markdown table with a row for each figure and a column for each server."""
    names = list(dict.fromkeys(figure.name for runs in rounds.values() for run in runs for figure in run))
    lines = [f"**{scenario}**\n", "| | " + " | ".join(rounds) + " |", "|---" * (len(rounds) + 1) + "|"]
    for name in names:
        cells = []
        for runs in rounds.values():
            unit = next((f.unit for run in runs for f in run if f.name == name), "")
            found = values_of(runs, name)
            cells.append(_cell(found, unit) if found else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary(results: Results) -> str:
    """Return a table of Jain's index of each pattern, its least, and the service of fair share against FCFS."""
    servers = list(dict.fromkeys(server for rounds in results.values() for server in rounds))
    lines = ["**Jain's index of all patterns**\n", "| | " + " | ".join(servers) + " | service, fair to fcfs |"]
    lines.append("|---" * (len(servers) + 2) + "|")
    every: dict[str, list[float]] = {server: [] for server in servers}
    ratios: list[float] = []
    for pattern, rounds in results.items():
        cells = []
        for server in servers:
            found = values_of(rounds[server], JAIN)
            every[server] += found
            cells.append(_cell(found, "") if found else "")
        fair, fcfs = (values_of(rounds.get(name, []), SERVICE) for name in SCHEDULERS)
        own = [mine / other for mine, other in zip(fair, fcfs, strict=False) if other]
        ratios += own
        lines.append(f"| {pattern} | " + " | ".join(cells) + f" | {_cell(own, '') if own else ''} |")
    least = " | ".join(f"{min(found):.3f}" if found else "" for found in every.values())
    lines.append(f"| least of all runs | {least} | {f'{min(ratios):.2f}' if ratios else ''} |")
    return "\n".join(lines) + "\n"


def values_of(runs: Sequence[list[Figure]], name: str) -> list[float]:
    """Return a figure's values in the runs that have it."""
    return [figure.value for run in runs for figure in run if figure.name == name and figure.value is not None]


def _cell(values: Sequence[float], unit: str) -> str:
    def number(value: float) -> str:
        digits = 0 if abs(value) >= 100 or unit == "%" else 3 if 0.9 < value < 1 else 2
        return "not served" if math.isinf(value) else f"{value:.{digits}f}"

    middle = number(statistics.median_low(values))
    middle += f" {unit}" if unit and not math.isinf(statistics.median_low(values)) else ""
    return middle if len(values) == 1 else f"{middle} ({number(min(values))} to {number(max(values))})"


@dataclass
class Progress:
    """Measurements so far, with a line for each on stderr. out: file for the results, rewritten after each."""

    results: Results
    device: str
    expected: float
    total: int
    out: Path | None
    done: int = 0
    failed: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def record(self, pattern: Pattern, server: str, target: Server, folder: Path) -> None:
        """Measure a pattern on a running server, print its figures and write all results so far."""
        found = figures(measure(pattern, target, folder))
        self.results[pattern.name][server].append(found)
        self._say(pattern, server, ", ".join(f"{f.name} {f.value:.3g}" for f in found if f.value is not None))
        if self.out:
            write(self.out, self.results, self.device, self.seconds)

    @contextlib.contextmanager
    def tolerated(self, pattern: Pattern, server: str) -> Iterator[None]:
        """Report a failure of the block, so that the other patterns are still measured."""
        try:
            yield
        except (AssertionError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            self.failed += 1
            self._say(pattern, server, f"FAILED: {type(error).__name__}: {str(error)[-500:]}")

    def _say(self, pattern: Pattern, server: str, words: str) -> None:
        self.done += 1
        place = f"[{self.seconds:.0f} of about {self.expected:.0f} s, {self.done} of {self.total}]"
        print(f"{place} {pattern.name}, {server}: {words}", file=sys.stderr, flush=True)


def write(out: Path, results: Results, device: str, seconds: float) -> None:
    """Write the tables, the figures of each run and a plot: OUT.md, OUT.json, OUT.svg."""
    facts = run_facts("benchmarks.fairness")
    plain = {
        scenario: {
            server: [{f.name: None if f.value is None or math.isinf(f.value) else f.value for f in run} for run in runs]
            for server, runs in servers.items()
        }
        for scenario, servers in results.items()
    }
    content = facts | {"seconds": seconds, "least_jain": least_jain(results), "results": plain}
    out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    bars = {
        f"{scenario} · {name}" + (f", {unit}" if unit else ""): [
            Bar(server, [f.value for run in runs for f in run if f.name == name and f.value is not None])
            for server, runs in servers.items()
        ]
        for scenario, servers in results.items()
        for name, unit in dict.fromkeys((f.name, f.unit) for runs in servers.values() for run in runs for f in run)
    }
    bar_chart(out.with_suffix(".svg"), f"Fairness between tenants, {facts['date']}, {facts['commit']}", bars)
    text = (
        f"# Fairness through the whole service, {facts['date']}\n\n"
        f"{facts['cores']} {facts['machine']} cores, device {device}, SmolLM2-135M, {SEATS} seats, at "
        f"{facts['commit']}. Command: `{facts['command']}` ({seconds / 60:.0f} minutes). Cells: median (least to "
        "greatest) of the rounds. `not served`: refused, failed or unfinished without a first token. Service: prompt "
        "tokens and twice the answers' tokens. "
        f"[Figures of each run]({out.name}.json), [plot]({out.name}.svg); "
        "[design/bench.md](../design/bench.md) defines the figures.\n"
    )
    tables = [summary(results), *(table(name, rounds) for name, rounds in results.items())]
    out.with_suffix(".md").write_text("\n".join([text, *tables]))


def least_jain(results: Results) -> dict[str, float | None]:
    """Return the least of Jain's index over all patterns and rounds of each server."""
    servers = dict.fromkeys(server for rounds in results.values() for server in rounds)
    found = {server: [v for rounds in results.values() for v in values_of(rounds[server], JAIN)] for server in servers}
    return {server: min(values, default=None) for server, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        *("--patterns", "--scenarios"),
        nargs="+",
        choices=[ALL, *NAMES],
        metavar="NAME",
        default=["weights", "flood", "late-tenant"],
        help=f"`{ALL}` (in short forms), or some of: {', '.join(NAMES)}",
    )
    parser.add_argument("--schedulers", nargs="*", default=list(SCHEDULERS), choices=SCHEDULERS)
    parser.add_argument("--device", default="auto", help="the engine's device, such as simulated:60,0.2")
    parser.add_argument("--vllm", type=vllm_command, help="the vllm command, or its virtual environment")
    parser.add_argument("--repeat", type=int, default=1, help="rounds")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="the scenarios' own lengths")
    length.add_argument("--seconds", type=duration, help="length of each pattern's arrivals, instead of its own")
    parser.add_argument("--folder", type=Path, help="for the whole reports; default: a new folder in /tmp")
    parser.add_argument("--out", type=Path, help="write OUT.md, OUT.json and OUT.svg")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fairness-"))
    patterns = [pattern.in_full() if options.full else pattern for pattern in chosen(options.patterns)]
    if options.seconds:
        patterns = [replace(pattern, seconds=options.seconds) for pattern in patterns]
    servers = [*options.schedulers, *([VLLM] if options.vllm else [])]
    runs = options.repeat * len(servers)
    progress = Progress(
        results={pattern.name: {server: [] for server in servers} for pattern in patterns},
        device=options.device,
        expected=runs * sum(pattern.longest + START_SECONDS for pattern in patterns),
        total=runs * len(patterns),
        out=options.out,
    )
    for number in range(options.repeat):
        run_round(progress, patterns, options.schedulers, options.vllm, folder / str(number))
    for text in (summary(progress.results), *(table(name, rounds) for name, rounds in progress.results.items())):
        print(text)
    return 1 if progress.failed else 0


def duration(text: str) -> float:
    """Return a number of seconds. Raises argparse.ArgumentTypeError if it is not one above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def run_round(
    progress: Progress, patterns: Sequence[Pattern], schedulers: Sequence[str], binary: Path | None, folder: Path
) -> None:
    """Measure every pattern on each server once. binary: the vllm command, if any."""
    for pattern in patterns:
        for scheduler in schedulers:
            place = folder / f"{pattern.name}-{scheduler}"
            with (
                progress.tolerated(pattern, scheduler),
                loraplex_server(scheduler, progress.device, place, pattern) as target,
            ):
                progress.record(pattern, scheduler, target, place / "reports")
    if binary:
        with vllm_server(binary) as target:
            for pattern in [pattern for pattern in patterns if not pattern.adapters]:
                with progress.tolerated(pattern, VLLM):
                    progress.record(pattern, VLLM, target, folder / VLLM)


if __name__ == "__main__":
    sys.exit(main())
