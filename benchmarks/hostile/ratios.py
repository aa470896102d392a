"""Ratios of attacked to quiet latencies, with their uncertainty.

A round has some 30 to 100 chats, so its p99 is its slowest chat, and two quiet rounds differ in it by up to a factor of
two. A ratio alone cannot tell an attack from this noise, so each ratio has an interval.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Chats in a row are resampled together, because a slow patch of the machine makes several of them slow.
BLOCK = 4
RESAMPLES = 1000
# Part of the resampled ratios below and above the interval.
TAIL = 0.05


@dataclass(frozen=True)
class Ratio:
    """A percentile as a factor of the quiet one, and the ends of its interval of 90 %. 0 without measurements."""

    value: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f} {self.high:.2f}]"


def percentile(values: Sequence[float], part: float) -> float:
    """Return the nearest-rank percentile; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def ratio(part: float, attacked: Sequence[float], quiet: Sequence[float]) -> Ratio:
    """Return the ratio of the percentiles. Its interval comes from resampling both by blocks (Künsch 1989)."""
    if not attacked or not quiet:
        return Ratio()
    rng = random.Random(0)
    ratios = sorted(
        percentile(_resampled(attacked, rng), part) / percentile(_resampled(quiet, rng), part) for _ in range(RESAMPLES)
    )
    value = percentile(attacked, part) / percentile(quiet, part)
    return Ratio(value, ratios[int(TAIL * RESAMPLES)], ratios[-1 - int(TAIL * RESAMPLES)])


def _resampled(values: Sequence[float], rng: random.Random) -> list[float]:
    length = min(BLOCK, len(values))
    starts = [rng.randrange(len(values) - length + 1) for _ in range(-(-len(values) // length))]
    return [value for start in starts for value in values[start : start + length]]


NO_RATIO = Ratio()
