"""Isolation: how much a tenant's p99 wait for the first token grows when the tenants that the baseline run leaves out
send requests too.

Works on the figures of reports. A wait without a first token is infinite, and null in the report.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loraplex.bench.metrics import finite, wait_at

Figures = Mapping[str, Any]


def isolation(baseline: Figures, runs: Sequence[Figures]) -> dict[str, Any]:
    """Return each baseline tenant's p99 wait with (median of the runs) and without the others, and the ratio.

    unserved_with, unserved_without: its requests without a first token, in all runs and in the baseline.
    """
    found = {}
    for name, alone in baseline["tenants"].items():
        own = [run["tenants"][name] for run in runs]
        beside = [value for figures in own if (value := wait_at(figures, "p99")) is not None]
        times = ratios(alone, own)
        found[name] = {
            "ttft_p99_without": finite(wait_at(alone, "p99")),
            "ttft_p99_with": finite(statistics.median(beside)) if beside else None,
            "ratio": finite(statistics.median(times)) if times else None,
            "unserved_without": alone["without_first_token"],
            "unserved_with": sum(figures["without_first_token"] for figures in own),
            "requests_without": alone["requests"],
            "requests_with": sum(figures["requests"] for figures in own),
        }
    return found


def wait_ratio(alone: Figures, beside: Figures) -> float | None:
    """Return the p99 of a tenant's waits beside others over the p99 without them, from a report's figures.

    Infinite if only the waits beside others are. None if the p99 alone is unknown, 0 or infinite.
    """
    without, with_others = wait_at(alone, "p99"), wait_at(beside, "p99")
    if with_others is None or not without or math.isinf(without):
        return None
    return with_others / without


def ratios(alone: Figures, runs: Sequence[Figures]) -> list[float]:
    """Return the known ratios of a tenant's p99 waits beside others to the one without them. runs: its figures."""
    return [value for figures in runs if (value := wait_ratio(alone, figures)) is not None]


def isolation_warnings(found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield a warning for each tenant and side with requests that had no first token."""
    for name, figures in found.items():
        for side, where in (("with", "beside the others"), ("without", "without the others")):
            if unserved := figures[f"unserved_{side}"]:
                yield (
                    f"isolation of {name}: {unserved} of {figures[f'requests_{side}']} requests {where} had no first "
                    "token and count as infinite waits"
                )
