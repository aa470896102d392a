"""Report of a benchmark: samples -> figures -> a table.

Rates in tokens per second over the whole run, times in seconds.
"""

import math
from collections.abc import Sequence
from typing import Any

import click

from loraplex.bench.run import Sample
from loraplex.bench.workload import Workload

PERCENTILES = (50, 95, 99)


def percentile(values: Sequence[float], p: float) -> float | None:
    """Return the nearest-rank percentile: the smallest value not exceeded by at least p percent. None for no values."""
    return sorted(values)[max(0, math.ceil(p / 100 * len(values)) - 1)] if values else None


def jain(shares: Sequence[float]) -> float | None:
    """Return Jain's index of fairness (Jain, Chiu, Hawe 1984): 1 for equal shares, 1/n if one has all.

    None for no shares.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


def summarise(workload: Workload, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Return the report as JSON-ready values, without the API keys."""
    failed = [sample for sample in samples if sample.error]
    names = list(dict.fromkeys(target.tenant for target in workload.targets))
    tenants = {name: _figures([s for s in samples if s.target.tenant == name], seconds) for name in names}
    return {
        "load": {
            "models": len(workload.targets),
            "requests": workload.n,
            "concurrency": workload.concurrency if workload.rate is None else None,
            "rate": workload.rate,
            "zipf": workload.zipf,
            "input_words": workload.input_words,
            "output_tokens": workload.output_tokens,
            "seed": workload.seed,
        },
        "seconds": seconds,
        "errors": len(failed),
        "first_error": failed[0].error if failed else None,
        "all": _figures(samples, seconds),
        "tenants": tenants,
        # jain_ttft compares the tenants' median time to first token.
        "fairness": {
            "jain_output_tokens": jain([t["output_tokens_per_second"] for t in tenants.values()]),
            "jain_ttft": jain([t["ttft"]["p50"] for t in tenants.values() if t["ttft"]["p50"] is not None]),
        },
    }


def _figures(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    done = [sample for sample in samples if not sample.error]
    prompt, output = sum(s.prompt_tokens for s in done), sum(s.completion_tokens for s in done)
    return {
        "requests": len(done),
        "requests_per_second": len(done) / seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
        "ttft": _spread([s.ttft for s in done if s.ttft is not None]),
        "inter_token": _spread([gap for s in done for gap in s.token_gaps]),
        "latency": _spread([s.latency for s in done]),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{p}": percentile(values, p) for p in PERCENTILES}


def print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    headings = (
        "",
        "requests",
        "output tok/s",
        "total tok/s",
        "TTFT p50",
        "p99",
        "inter-token p50",
        "p99",
        "latency p50",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    rows = {"all": report["all"]} | (report["tenants"] if len(report["tenants"]) > 1 else {})
    for name, figures in rows.items():
        table.add_row(
            name,
            str(figures["requests"]),
            f"{figures['output_tokens_per_second']:.1f}",
            f"{figures['total_tokens_per_second']:.1f}",
            *(_ms(figures[kind][p]) for kind in ("ttft", "inter_token") for p in ("p50", "p99")),
            _ms(figures["latency"]["p50"]),
        )
    Console(width=110, highlight=False).print(table)
    if len(report["tenants"]) > 1 and (index := report["fairness"]["jain_ttft"]) is not None:
        click.echo(f"fairness between tenants (Jain): {index:.3f} in time to the first token")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"
