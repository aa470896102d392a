"""Timing of device work: calls rotate over more memory than the L2 cache holds, in one CUDA graph.

Reports the median of event times. A graph, because decode runs as a graph, and because a launch from Python takes
longer than the kernels measured here. The limits of memory and tensor cores are measured in the same run, never taken
from a data sheet.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

REPLAYS = 30


@dataclass(frozen=True, slots=True)
class Work:
    """Row of a table. calls: the same work on different memory. num_bytes, flops: lower bounds for one call."""

    name: str
    calls: Sequence[Callable[[], object]]
    num_bytes: int
    flops: int = 0
    baseline: Sequence[Callable[[], object]] | None = None
    """What the work is added to (LoRA: the base projection), timed beside it."""
    least_bandwidth: float = 0.0
    least_matrix: float = 0.0
    """Shares of the copy bandwidth and of the matrix rate that it is asked to reach."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    microseconds: float
    bandwidth_share: float
    matrix_share: float
    baseline_microseconds: float | None


def copies_past_l2(bytes_per_call: int) -> int:
    """Return how many copies of the inputs to rotate over, so that no copy is in the L2 cache when its call runs."""
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    return max(2, min(64, -(-2 * l2 // bytes_per_call)))


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median device time of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()  # compiles, and lets cuBLAS choose its algorithm
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


@cache
def bandwidth() -> float:
    """Return bytes per second of a device-to-device copy, counting read and written bytes."""
    source = [torch.empty(512 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    target = torch.empty_like(source[0])
    return 2 * target.numel() / microseconds([partial(target.copy_, s) for s in source]) * 1e6


@cache
def matrix_rate() -> float:
    """Return operations per second of a bf16 product of 8,192 x 8,192 matrices."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / microseconds([lambda: a @ b] * 4) * 1e6


def measure(work: Work) -> Row:
    taken = microseconds(work.calls)
    return Row(
        work.name,
        taken,
        work.num_bytes / taken * 1e6 / bandwidth(),
        work.flops / taken * 1e6 / matrix_rate(),
        microseconds(work.baseline) if work.baseline else None,
    )


HOLDS, MISSED = "- holds: ", "- MISSED: "


def asked(what: str, found: float, *, least: float | None = None, most: float | None = None) -> str:
    """Return a report line that compares a figure with its target, a lower or an upper bound."""
    holds = (least is None or found >= least) and (most is None or found <= most)
    bounds = [f"{name} {bound:g}" for name, bound in (("at least", least), ("at most", most)) if bound is not None]
    return f"{HOLDS if holds else MISSED}{what}: {found:.3g}; asked: {' and '.join(bounds)}"


def verdicts(work: Work, row: Row) -> list[str]:
    """Return the verdict on each target of the work."""
    shares = (
        ("copy bandwidth", row.bandwidth_share, work.least_bandwidth),
        ("matrix rate", row.matrix_share, work.least_matrix),
    )
    return [asked(f"{work.name}, of the {name}", share, least=least) for name, share, least in shares if least]


def header(title: str) -> str:
    """Return a table header in Markdown."""
    return f"\n### {title}\n\n| case | µs | of copy bandwidth | of matrix rate | added to, µs |\n|---|---|---|---|---|"


def line(row: Row) -> str:
    matrix = f"{row.matrix_share:.0%}" if row.matrix_share else "-"
    base = f"{row.baseline_microseconds:.1f}" if row.baseline_microseconds is not None else "-"
    return f"| {row.name} | {row.microseconds:.1f} | {row.bandwidth_share:.0%} | {matrix} | {base} |"
