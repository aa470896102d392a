"""Report of a benchmark as JSON-ready values; docs/design/bench.md documents the schema.

Holds no API key and no prompt.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from loraplex.bench.fairness import fairness
from loraplex.bench.isolation import isolation, isolation_warnings, ratios
from loraplex.bench.load import Load, Source, is_endless
from loraplex.bench.metrics import figures, finite, spread, ttft
from loraplex.bench.monitor import BUSY_CPU, LATE_SECONDS, Monitor
from loraplex.bench.run import Run
from loraplex.bench.sending import UNFINISHED, Sample

SCHEMA = "loraplex.bench/1"
# Points of a tenant's requests in the plots.
MAX_POINTS = 2000
# Figures whose spread repeated runs report and `--compare` compares: path in a run, whether more is better.
COMPARED: tuple[tuple[str, bool], ...] = (
    ("output_tokens_per_second", True),
    ("total_tokens_per_second", True),
    ("requests_per_second", True),
    ("goodput.share", True),
    ("ttft.mean", False),
    ("ttft.p50", False),
    ("ttft.p90", False),
    ("ttft.p99", False),
    ("inter_token.p50", False),
    ("inter_token.p99", False),
    ("tpot.p50", False),
    ("tpot.p99", False),
    ("latency.p50", False),
    ("latency.p99", False),
    ("failed", False),
    ("without_first_token", False),
)
COMPARED_FAIRNESS: tuple[tuple[str, bool], ...] = (
    ("jain_entitled", True),
    ("jain_service", True),
    ("largest_difference.of_mean", False),
)
# Figure of a baseline's tenant in the summary: its p99 wait beside the others over the one without them.
ISOLATION = "isolation.ratio"


def run_report(run: Run) -> dict[str, Any]:
    """Return one run's figures."""
    names = [tenant.name for tenant in run.load.tenants]
    slos = {tenant.name: tenant.slo for tenant in run.load.tenants}
    own: dict[str, list[Sample]] = {name: [] for name in names}
    for sample in run.samples:
        own[sample.planned.target.tenant].append(sample)
    failed = [s for s in run.samples if s.error not in (None, UNFINISHED)]
    until = min(run.seconds, math.inf if run.load.seconds is None else run.load.seconds)
    return {
        "seconds": run.seconds,
        "interrupted": run.interrupted,
        "first_error": f"{failed[0].error.kind}: {failed[0].error.text}" if failed and failed[0].error else None,
        "all": figures(run.samples, run.seconds, slos),
        "tenants": {name: figures(own[name], run.seconds, slos) for name in names},
        "fairness": fairness(run.load, own, until),
        "generator": generator_report(run),
        "ttft_points": {name: _points(own[name]) for name in names},
    }


def generator_report(run: Run) -> dict[str, Any]:
    """Return how well the generator kept to its plan. late: sending times after the planned ones, in an open loop."""
    monitor: Monitor = run.monitor
    late = [s.sent - s.due for s in run.samples if s.planned.at is not None]
    busiest = max(monitor.cpu, default=None)
    lag = spread(monitor.lags)
    is_late = lag["p99"] is not None and lag["p99"] > LATE_SECONDS
    return {
        "late": spread(late),
        "lag": lag,
        "cpu_mean": statistics.fmean(monitor.cpu) if monitor.cpu else None,
        "cpu_busiest_second": busiest,
        "was_bottleneck": is_late or (busiest is not None and busiest > BUSY_CPU),
    }


def _points(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Return (due time, TTFT) of at most `MAX_POINTS` requests."""
    points = [(s.due, value) for s in samples if (value := ttft(s)) is not None]
    step = max(1, math.ceil(len(points) / MAX_POINTS))
    return [(round(at, 4), round(value, 4)) for at, value in points[::step]]


def load_report(load: Load) -> dict[str, Any]:
    """Return the load without keys."""
    return {
        "seed": load.seed,
        "seconds": load.seconds,
        "warmup": load.warmup,
        "api": load.api,
        "timeout": load.timeout,
        "drain": load.drain,
        "ignore_eos": load.ignore_eos,
        "window": load.window,
        "service": {"input": load.input_weight, "output": load.output_weight},
        "tenants": {t.name: {"weight": t.weight, "slo": msgspec.to_builtins(t.slo)} for t in load.tenants},
        "sources": [_source_report(source) for source in load.sources],
        "plan": {
            "sha256": load.plan_hash(),
            "requests": None
            if any(is_endless(source) for source in load.sources)
            else sum(1 for source in load.sources for _ in load.plan(source)),
        },
    }


def _source_report(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "models": list(dict.fromkeys(target.model for target in source.targets)),
        "arrival": msgspec.to_builtins(source.arrival),
        "popularity": msgspec.to_builtins(source.popularity),
        "input": "trace" if source.rows else msgspec.to_builtins(source.input),
        "output": "trace" if source.rows else msgspec.to_builtins(source.output),
        "start": source.start,
        "stop": source.stop,
        "requests": source.requests,
    }


def value_at(figures_: dict[str, Any], path: str) -> float | None:
    """Return the number at a path like `ttft.p99`, None where a part is missing."""
    value: Any = figures_
    for key in path.split("."):
        if not isinstance(value, dict) or value.get(key) is None:
            return None
        value = value[key]
    return value


def summary(runs: Sequence[dict[str, Any]], baseline: dict[str, Any] | None) -> dict[str, Any]:
    """Return median, least and greatest value of each compared figure over the runs: of all, and of each tenant.

    A baseline's tenants have a ratio too, null if infinite.
    """
    own = {name: [run["tenants"][name] for run in runs] for name in (runs[0]["tenants"] if runs else ())}
    tenants = {name: _medians(groups, COMPARED) for name, groups in own.items()}
    for name, alone in (baseline["tenants"] if baseline and runs else {}).items():
        if times := ratios(alone, own[name]):
            tenants[name][ISOLATION] = _range(times)
    return {
        "all": _medians([run["all"] for run in runs], COMPARED),
        "tenants": tenants,
        "fairness": _medians([run["fairness"] for run in runs], COMPARED_FAIRNESS),
    }


def _medians(groups: Sequence[dict[str, Any]], paths: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    found = {}
    for path, _ in paths:
        values = [value for group in groups if (value := value_at(group, path)) is not None]
        if values:
            found[path] = _range(values)
    return found


def _range(values: Sequence[float]) -> dict[str, float | None]:
    measures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: finite(value) for name, value in measures.items()}


def warnings(report: dict[str, Any]) -> list[str]:
    """Return the reasons why a report's figures may mislead."""
    found = []
    for number, run in enumerate(report["runs"], 1):
        where = f"run {number}: " if len(report["runs"]) > 1 else ""
        generator, counts = run["generator"], run["all"]["counts"]
        if generator["was_bottleneck"]:
            cpu, lag = generator["cpu_busiest_second"], generator["lag"]["p99"]
            found.append(
                f"{where}the generator was a bottleneck (CPU {100 * (cpu or 0):.0f} % in its busiest second, "
                f"event loop p99 {1e3 * (lag or 0):.0f} ms late); its own delays are part of the latencies"
            )
        if run["interrupted"]:
            found.append(f"{where}interrupted; {run['all']['unfinished']} requests were in flight")
        if counts["without_usage"]:
            found.append(f"{where}{counts['without_usage']} answers had no usage block; their events count as tokens")
        if counts["more_events"]:
            found.append(f"{where}{counts['more_events']} answers had more events than the server counted tokens")
        if counts["longer"]:
            found.append(f"{where}{counts['longer']} answers were longer than their max_tokens")
        if counts["shorter"]:
            found.append(f"{where}{counts['shorter']} answers were shorter than planned")
    return [*found, *isolation_warnings(report["isolation"] or {})]


def make_report(
    server: str, load: Load, runs: Sequence[dict[str, Any]], baseline: dict[str, Any] | None, **about: Any
) -> dict[str, Any]:
    """Return the whole report. about: version, start time, scenario's name and description, overhead."""
    report = {
        "schema": SCHEMA,
        **about,
        "server": server,
        "load": load_report(load),
        "runs": list(runs),
        "summary": summary(runs, baseline),
        "baseline": baseline,
        "isolation": isolation(baseline, runs) if baseline is not None and runs else None,
    }
    return report | {"warnings": warnings(report)}
