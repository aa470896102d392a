"""A report as one HTML page: tables and plots, light or dark as the reader's system, without scripts or other files."""

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from loraplex.bench.svg import plot
from loraplex.bench.table import TOTAL, isolated, milliseconds, overhead_line

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --line: #d5d9de; --soft: #5b646e;
  --series-0: #0b62c4; --series-1: #c4501b; --series-2: #1d7f4f; --series-3: #8a3ab9; --series-4: #a07800;
  --series-5: #00808a; --series-6: #b3245f; --series-7: #666; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --paper: #15181b; --line: #353b41; --soft: #9aa4ae;
  --series-0: #6cb0ff; --series-1: #ff9a66; --series-2: #63cf97; --series-3: #cf95f2; --series-4: #e2bd45;
  --series-5: #4fd0da; --series-6: #ff80af; --series-7: #aaa; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.soft, figcaption { color: var(--soft); }
.scroll { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--line); stroke-width: 1; }
.key { margin-left: 1rem; white-space: nowrap; } .key i { display: inline-block; width: .8rem; height: .8rem;
  margin-right: .3rem; border-radius: 2px; vertical-align: -1px; }
@media (max-width: 40rem) { svg text { font-size: 18px; } th { white-space: normal; vertical-align: bottom; } }
.warning { border-left: 4px solid var(--series-1); padding-left: .8rem; }
"""
LATENCIES = ("ttft", "inter_token", "tpot", "latency")


def html_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    title = escape(f"{report['name']}: load on {report['server']}")
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
        f"<p class='soft'>{escape(report['description'])}. Started {escape(report['started'])}, "
        f"seed {report['load']['seed']}, plan {report['load']['plan']['sha256'][:12]}, "
        f"Loraplex {escape(report['loraplex'])}.</p>",
        *(f"<p class='warning'>{escape(warning)}</p>" for warning in report["warnings"]),
        _isolation(report["isolation"]),
    ]
    for number, run in enumerate(report["runs"], 1):
        parts.append(_run(run, f"Run {number}" if len(report["runs"]) > 1 else "Run"))
    if len(report["runs"]) > 1:
        parts += ["<h2>Spread of the runs</h2>", _spread(report["summary"])]
    if report["baseline"]:
        parts.append(_run(report["baseline"], "Baseline"))
    if report["overhead"]:
        parts += ["<h2>Generator</h2>", f"<p>{escape(overhead_line(report['overhead']))}.</p>"]
    return "".join([*parts, "</body></html>\n"])


def _run(run: Mapping[str, Any], title: str) -> str:
    fairness, series = run["fairness"], run["fairness"]["series"]
    service = {
        name: [(0.0, 0.0), *zip(series["times"], values, strict=True)] for name, values in series["service"].items()
    }
    parts = [
        f"<h2>{escape(title)}</h2>",
        _figures([(TOTAL, run["all"]), *run["tenants"].items()]),
        _errors(run["all"]["errors"]),
        _fairness(fairness) if len(run["tenants"]) > 1 else "",
        plot(service, "seconds", "Service received, weighted tokens"),
        plot(
            {name: _rates(points) for name, points in service.items()}, "seconds", "Service, weighted tokens a second"
        ),
        plot(run["ttft_points"], "planned time in seconds", "Time to first token, seconds", dots=True),
        plot(
            {name: _distribution(points) for name, points in run["ttft_points"].items()},
            "time to first token in seconds",
            "Requests below, percent",
        ),
    ]
    return "".join(parts)


def _rates(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(b[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in itertools.pairwise(points) if b[0] > a[0]]


def _distribution(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    values = sorted(value for _, value in points)
    return [(value, 100 * (number + 1) / len(values)) for number, value in enumerate(values)]


def _figures(groups: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    head = ["", "requests", "failed", "requests/s", "output tok/s", "total tok/s", "goodput"]
    head += [f"{kind.replace('_', ' ')} {p}" for kind in LATENCIES for p in ("mean", "p50", "p90", "p99")]
    rows = []
    for name, figures in groups:
        good = figures["goodput"]
        cells = [name, str(figures["completed"]), str(figures["failed"]), f"{figures['requests_per_second']:.2f}"]
        cells += [f"{figures[f'{kind}_tokens_per_second']:.1f}" for kind in ("output", "total")]
        cells += ["-" if good is None else f"{100 * good['share']:.1f} %"]
        cells += [milliseconds(figures[kind][p]) for kind in LATENCIES for p in ("mean", "p50", "p90", "p99")]
        rows.append(cells)
    return _table(head, rows)


def _errors(errors: Mapping[str, int]) -> str:
    return _table(["failure", "requests"], [[kind, str(count)] for kind, count in errors.items()]) if errors else ""


def _fairness(fairness: Mapping[str, Any]) -> str:
    rows = []
    for name, tenant in fairness["tenants"].items():
        share = tenant["of_entitled"]
        rows.append(
            [
                *(name, f"{tenant['weight']:g}", f"{tenant['service']:.0f}", f"{tenant['entitled']:.0f}"),
                "-" if share is None else f"{100 * share:.1f} %",
            ]
        )
    parts = [_table(["tenant", "weight", "service", "entitled", "of entitled"], rows)]
    if fairness["jain_entitled"] is not None:
        parts.append(
            f"<p>Jain's index: {fairness['jain_entitled']:.3f} of service by entitlement, "
            f"{fairness['jain_service']:.3f} of service by weight.</p>"
        )
    if (difference := fairness["largest_difference"]) is not None:
        parts.append(
            f"<p>Largest service difference of backlogged tenants in {fairness['window']:.3g} s: "
            f"{difference['tokens']:.0f} weighted tokens, {100 * difference['of_mean']:.0f} % of their mean "
            f"({escape(' and '.join(difference['tenants']))}, from second {difference['start']:.3g}).</p>"
        )
    return "".join(parts)


def _isolation(isolation: Mapping[str, Any] | None) -> str:
    if not isolation:
        return ""
    rows = [
        [
            *(name, isolated(figures, "without"), isolated(figures, "with")),
            "-" if figures["ratio"] is None else f"{figures['ratio']:.2f}",
        ]
        for name, figures in isolation.items()
    ]
    return "<h2>Isolation</h2>" + _table(
        ["p99 time to first token", "without the others", "beside them", "ratio"], rows
    )


def _spread(summary: Mapping[str, Any]) -> str:
    rows = [
        [path, f"{value['median']:.4g}", f"{value['min']:.4g}", f"{value['max']:.4g}"]
        for path, value in (summary["all"] | summary["fairness"]).items()
    ]
    return _table(["figure", "median", "least", "greatest"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heading = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{heading}</tr>{body}</table></div>"
