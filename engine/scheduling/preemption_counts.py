"""Counts of preemptions by pair of tenants: the preempted one and the one that took its place."""

from collections import Counter
from typing import NamedTuple

# Maximum number of pairs of tenants. A further pair replaces the one with the fewest preemptions.
MAX_PAIRS = 256


class PreemptionCount(NamedTuple):
    """Number of a tenant's requests preempted for requests of the tenant `by`."""

    tenant_id: str
    by: str
    number: int


class PreemptionCounts:
    """Counts since the engine's start."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, tenant_id: str, by: str) -> None:
        if (tenant_id, by) not in self._counts and len(self._counts) >= MAX_PAIRS:
            del self._counts[min(self._counts, key=self._counts.__getitem__)]
        self._counts[tenant_id, by] += 1

    def largest(self, limit: int) -> tuple[PreemptionCount, ...]:
        """Return the pairs with most preemptions."""
        return tuple(PreemptionCount(*pair, number) for pair, number in self._counts.most_common(limit))
