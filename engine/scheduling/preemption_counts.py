"""Counts of preemptions by the tenant that gave way and the tenant that it gave way to. Knows no requests."""

from collections import Counter
from typing import NamedTuple

# Pairs of tenants that are counted. Beyond it, the pair with the fewest preemptions is forgotten.
MAX_PAIRS = 256


class PreemptionCount(NamedTuple):
    """Preemptions of a tenant's requests for requests of the tenant `by`."""

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
