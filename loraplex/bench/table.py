"""A report's table for the terminal."""

from collections.abc import Mapping
from typing import Any

from loraplex.bench.terminal import echo, print_table

HEADINGS = (
    *("", "requests", "failed", "output tok/s", "total tok/s", "TTFT p50", "p99"),
    *("inter-token p50", "p99", "latency p50", "p99"),
)
# Heading of the figures of all tenants' requests. A scenario's tenant cannot have this name: it has a space.
TOTAL = "all requests"


def print_report(report: dict[str, Any]) -> None:
    """Print the last run's figures, and the spread if there are several runs."""
    if report["runs"]:
        _print_run(report["runs"][-1])
    if report["isolation"]:
        for name, figures in report["isolation"].items():
            echo(
                f"isolation of {name}: p99 TTFT {isolated(figures, 'with')} beside the others, "
                f"{isolated(figures, 'without')} without{_times(figures['ratio'])}"
            )
    if len(report["runs"]) > 1:
        _print_spread(report)
    if report.get("overhead"):
        echo(overhead_line(report["overhead"]))
    for warning in report["warnings"]:
        echo(f"warning: {warning}")


def _print_run(run: dict[str, Any]) -> None:
    rows = [
        (
            name,
            str(figures["completed"]),
            str(figures["failed"]),
            f"{figures['output_tokens_per_second']:.1f}",
            f"{figures['total_tokens_per_second']:.1f}",
            *(milliseconds(figures[kind][p]) for kind in ("ttft", "inter_token", "latency") for p in ("p50", "p99")),
        )
        for name, figures in [(TOTAL, run["all"]), *(run["tenants"].items() if len(run["tenants"]) > 1 else ())]
    ]
    print_table(HEADINGS, rows, left={0}, width=130)
    for kind, count in run["all"]["errors"].items():
        echo(f"failed: {count} of {kind}")
    if run["all"]["goodput"]:
        good = run["all"]["goodput"]
        echo(f"goodput: {100 * good['share']:.1f} % within the targets, {good['requests_per_second']:.2f} a second")
    if len(run["tenants"]) > 1:
        _print_fairness(run["fairness"])


def isolated(figures: Mapping[str, Any], side: str) -> str:
    """Return a tenant's p99 wait `with` or `without` the others; its null means that the request was not served."""
    seconds = figures[f"ttft_p99_{side}"]
    return "not served" if seconds is None and figures[f"unserved_{side}"] else milliseconds(seconds)


def _print_fairness(fairness: dict[str, Any]) -> None:
    for name, tenant in fairness["tenants"].items():
        share = tenant["of_entitled"]
        echo(
            f"service of {name}: {tenant['service']:.0f} weighted tokens at weight {tenant['weight']:g}"
            + ("" if share is None else f", {100 * share:.1f} % of its max-min share")
        )
    if (index := fairness["jain_entitled"]) is not None:
        echo(f"fairness (Jain): {index:.3f} of max-min shares, {fairness['jain_service']:.3f} of weighted service")
    if (difference := fairness["largest_difference"]) is not None:
        echo(
            f"largest service difference of backlogged tenants in {fairness['window']:.3g} s: "
            f"{difference['tokens']:.0f} weighted tokens ({100 * difference['of_mean']:.0f} % of their mean), "
            f"{' and '.join(difference['tenants'])}"
        )


def _print_spread(report: dict[str, Any]) -> None:
    echo(f"{len(report['runs'])} runs, median (least to greatest):")
    for path, value in (report["summary"]["all"] | report["summary"]["fairness"]).items():
        echo(f"  {path}: {value['median']:.4g} ({value['min']:.4g} to {value['max']:.4g})")


def overhead_line(overhead: dict[str, Any]) -> str:
    return (
        f"generator: at most {overhead['max_requests_per_second']:.0f} requests and "
        f"{overhead['max_events_per_second']:.0f} events a second; at {overhead['rate']:.3g} requests a second it adds "
        f"{milliseconds(overhead['ttft']['p50'])} to a TTFT (p99 {milliseconds(overhead['ttft']['p99'])})"
    )


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f} times)"
