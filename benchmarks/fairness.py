"""Fairness between tenants through the whole service: our schedulers `fair` and `fcfs`, and vLLM, in one run.

    python -m benchmarks.fairness --repeat 3 --vllm VENV/bin/vllm --out docs/perf/2026-11-22-fairness

Each round starts each server anew and sends it the same load with `loraplex bench --scenario`. Loraplex runs as
`loraplex up --demo` (gateway, Valkey, SQLite, engine), vLLM without a gateway or LoRA and with as many seats. The
scenarios are those of `examples/scenarios/`, shortened (`LIMITS`) unless --full is given. Three rounds of all three
servers take about 22 minutes on two cores. Prints Markdown tables: median (least to greatest) over the rounds.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.against_vllm import serving, vllm
from benchmarks.hostile.place import of_stack
from benchmarks.plot import Bar, bar_chart
from loraplex.bench.metrics import percentile
from loraplex.models import ensure_demo_model
from testing.ports import free_port
from testing.stack import CACHE, ROOT, Stack, data_dir, loraplex

SCENARIOS = ROOT / "examples" / "scenarios"
SCHEDULERS = ("fair", "fcfs")
VLLM = "vllm"
SEATS = 64
NO_LIMITS = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_concurrent": 10**4}
# Seconds of arrivals and of the drain. A closed loop that is always backlogged needs no drain.
LIMITS = {"weights": (45, 0), "flood": (20, 10), "late-tenant": (20, 10)}


@dataclass(frozen=True)
class Server:
    """A server under test. keys: each tenant's API key; empty for a server without tenants."""

    url: str
    model: str
    keys: dict[str, str]


@dataclass(frozen=True)
class Figure:
    """A figure of one run. value: infinite if the run ended before the request was served."""

    name: str
    unit: str
    value: float | None


@contextlib.contextmanager
def loraplex_server(scheduler: str, folder: Path, scenarios: Sequence[str]) -> Iterator[Server]:
    """Start the whole service, with the scenarios' tenants, their weights and no rate limits."""
    stack = Stack(data_dir(folder), "--demo", "--engine-args", f"--scheduler {scheduler}")
    try:
        place = of_stack(stack.wait_ready())
        tenants = [tenant for name in scenarios for tenant in tomllib.loads(text_of(name))["tenants"]]
        keys = {t["name"]: place.tenant(t["name"], weight=t.get("weight", 1.0), **NO_LIMITS) for t in tenants}
        yield Server(place.url, place.base_model, keys)
    finally:
        stack.stop()


@contextlib.contextmanager
def vllm_server(binary: Path) -> Iterator[Server]:
    port = free_port()
    command, environment = vllm(str(binary), ensure_demo_model(CACHE), [], port, seats=SEATS)
    with serving(command, port, environment) as url:
        yield Server(url, "base", {})


def text_of(scenario: str) -> str:
    return (SCENARIOS / f"{scenario}.toml").read_text()


def shortened(scenario: str) -> str:
    """Return the scenario's text with the limits of `LIMITS`."""
    if scenario not in LIMITS:
        return text_of(scenario)
    seconds, drain = LIMITS[scenario]
    text, count = re.subn(r"^seconds = .*$", f"seconds = {seconds}\ndrain = {drain}", text_of(scenario), flags=re.M)
    assert count == 1, f"{scenario}: expected one line with seconds"
    return text


def measure(scenario: str, server: Server, folder: Path, *, full: bool) -> dict[str, Any]:
    """Return the report of a scenario. Raises RuntimeError if the benchmark fails."""
    folder.mkdir(parents=True, exist_ok=True)
    file, out, known = folder / f"{scenario}.toml", folder / f"{scenario}.json", folder / "tenants.json"
    file.write_text(text_of(scenario) if full else shortened(scenario))
    flags = ["--scenario", file, "--json", out]
    if server.keys:
        tenants = [{"name": name, "api_key": key, "models": [server.model]} for name, key in server.keys.items()]
        known.write_text(json.dumps({"gateway": server.url, "tenants": tenants}))
        flags += ["--tenants", known]
    else:
        flags += ["--url", server.url]
    done = loraplex("bench", *map(str, flags), "--accept-errors", "--no-overhead", timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{scenario}: {done.stderr}")
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def figures(scenario: str, report: dict[str, Any]) -> list[Figure]:
    """Return the figures of a report's only run. Closed loops have shares, the other tenants times."""
    [run] = report["runs"]
    fairness = run["fairness"]
    found = []
    closed = {s["name"] for s in report["load"]["sources"] if s["arrival"]["kind"] == "closed"}
    for name, tenant in run["tenants"].items():
        if name not in closed:
            with_others = ttfts(run, name)
            found += [Figure(f"{name}: TTFT p{p}", "s", percentile(with_others, p)) for p in (50, 99)]
            if report["baseline"] and name in report["baseline"]["tenants"]:
                without, beside = (percentile(ttfts(r, name), 99) for r in (report["baseline"], run))
                found.append(
                    Figure(f"{name}: p99 over p99 alone", "", beside / without if beside and without else None)
                )
        if len(closed) > 1 or name not in closed:
            share = fairness["tenants"][name]["of_entitled"]
            found.append(Figure(f"{name}: of its share", "%", None if share is None else 100 * share))
        if tenant["failed"]:
            found.append(Figure(f"{name}: failed", "", tenant["failed"]))
    service = sum(tenant["service"] for tenant in fairness["tenants"].values())
    return [
        *found,
        Figure("Jain's index", "", fairness["jain_entitled"]),
        Figure("service of all a second", "", service / fairness["until"]),
    ]


def ttfts(run: dict[str, Any], tenant: str) -> list[float]:
    """Return the times to first token of a tenant's requests; infinite for those without one when the run ended."""
    known = [seconds for _, seconds in run["ttft_points"][tenant]]
    cut = run["tenants"][tenant]["completed"] + run["tenants"][tenant]["unfinished"] - len(known)
    return known + [math.inf] * max(0, cut)


def table(scenario: str, rounds: dict[str, list[list[Figure]]]) -> str:
    """Return a Markdown table with a row for each figure and a column for each server."""
    names = list(dict.fromkeys(figure.name for runs in rounds.values() for run in runs for figure in run))
    lines = [f"**{scenario}**\n", "| | " + " | ".join(rounds) + " |", "|---" * (len(rounds) + 1) + "|"]
    for name in names:
        cells = []
        for runs in rounds.values():
            found = [f for run in runs for f in run if f.name == name and f.value is not None]
            cells.append(_cell([f.value for f in found if f.value is not None], found[0].unit) if found else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float], unit: str) -> str:
    def number(value: float) -> str:
        digits = 0 if abs(value) >= 100 or unit == "%" else 3 if 0.9 < value < 1 else 2
        return "not served" if math.isinf(value) else f"{value:.{digits}f}"

    middle = number(statistics.median_low(values))
    middle += f" {unit}" if unit and not math.isinf(statistics.median_low(values)) else ""
    return middle if len(values) == 1 else f"{middle} ({number(min(values))} to {number(max(values))})"


def about() -> dict[str, Any]:
    command = ("git", "rev-parse", "--short", "HEAD")
    commit = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return {
        "date": str(date.today()),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "commit": commit.stdout.strip(),
        "command": "python -m benchmarks.fairness " + " ".join(sys.argv[1:]),
    }


def write(out: Path, results: dict[str, dict[str, list[list[Figure]]]], seconds: float) -> None:
    """Write the tables, the figures of each run and a plot: OUT.md, OUT.json, OUT.svg."""
    facts = about()
    plain = {
        scenario: {
            server: [{f.name: None if f.value is None or math.isinf(f.value) else f.value for f in run} for run in runs]
            for server, runs in servers.items()
        }
        for scenario, servers in results.items()
    }
    out.with_suffix(".json").write_text(json.dumps(facts | {"seconds": seconds, "results": plain}, indent=1) + "\n")
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
        f"{facts['cores']} {facts['machine']} cores, no GPU, SmolLM2-135M, {SEATS} seats, at {facts['commit']}. "
        f"Command: `{facts['command']}` ({seconds / 60:.0f} minutes). Cells: median (least to greatest) of the rounds. "
        "`not served`: the run ended first. Service: prompt tokens and twice the answers' tokens. "
        f"[Figures of each run]({out.name}.json), [plot]({out.name}.svg); "
        "[design/bench.md](../design/bench.md) defines the figures.\n"
    )
    out.with_suffix(".md").write_text("\n".join([text, *(table(name, rounds) for name, rounds in results.items())]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=["weights", "flood", "late-tenant"])
    parser.add_argument("--schedulers", nargs="*", default=list(SCHEDULERS), choices=SCHEDULERS)
    parser.add_argument("--vllm", type=Path, help="the vllm command, or its virtual environment; default: without vLLM")
    parser.add_argument("--repeat", type=int, default=1, help="rounds")
    parser.add_argument("--full", action="store_true", help="the scenarios' own lengths")
    parser.add_argument("--folder", type=Path, help="for the whole reports; default: a new folder in /tmp")
    parser.add_argument("--out", type=Path, help="write OUT.md, OUT.json and OUT.svg")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fairness-"))
    binary = options.vllm / "bin" / "vllm" if options.vllm and options.vllm.is_dir() else options.vllm
    if binary and not binary.is_file():
        parser.error(f"--vllm: expected the vllm command or its virtual environment, got {options.vllm}")
    servers = [*options.schedulers, *([VLLM] if binary else [])]
    results: dict[str, dict[str, list[list[Figure]]]] = {
        scenario: {server: [] for server in servers} for scenario in options.scenarios
    }
    started = time.monotonic()
    for number in range(options.repeat):
        for server in servers:
            place = folder / f"{number}-{server}"
            running = vllm_server(binary) if server == VLLM else loraplex_server(server, place, options.scenarios)
            with running as target:
                for scenario in options.scenarios:
                    report = measure(scenario, target, place / "reports", full=options.full)
                    results[scenario][server].append(figures(scenario, report))
                    line = ", ".join(
                        f"{f.name} {f.value:.3g}" for f in results[scenario][server][-1] if f.value is not None
                    )
                    print(f"[{time.monotonic() - started:.0f} s] {number} {server} {scenario}: {line}", file=sys.stderr)
                    if options.out:  # a later failure must not lose the rounds so far
                        write(options.out, results, time.monotonic() - started)
    for scenario, rounds in results.items():
        print(table(scenario, rounds))


if __name__ == "__main__":
    main()
