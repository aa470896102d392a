"""Eviction order of idle adapters: least often used, except that a tenant which loads much evicts its own first.

A tenant that cycles through many adapters would otherwise evict a neighbour's only adapter between two of its uses.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from adapters.decaying_sums import DecayingSums
from adapters.tiers.reservations import Amount
from adapters.use_counts import UseCounts

# Half-life of the bytes that a tenant has loaded recently, in seconds.
HALF_LIFE_S = 30.0
# An adapter unused for this time is evicted first, regardless of its owner.
STALE_S = 60.0
# A tenant's adapters are not evicted while another tenant with idle adapters has loaded this many times as much.
HEAVY_RATIO = 2.0
# The choice is among this many of the least recently used adapters and this many of the most recently used ones, so
# that a step waits at most 1.5 ms for it. Adapters of a tenant that cycles through many are among the latter.
LOOK_OLDEST, LOOK_NEWEST = 512, 128


@dataclass(eq=False, slots=True)
class Resident:
    """An adapter that owns pages.

    owner: the tenant with the fewest recently loaded bytes among those that used it. asked_in: the last step in which a
    request asked for it while it was idle. ready_at: the time at which its copy ended, infinite until then.
    """

    slot: int
    pages: list[int]
    size: Amount
    owner: str = ""
    pins: int = 0
    asked_in: int = -1
    used_at: float = 0.0
    ready_at: float = math.inf


@dataclass(slots=True)
class IdleAdapters:
    """Resident adapters without requests, with the loads of their owners. Each method takes bounded time, except
    that `victim` skips the adapters that were asked for in this step.
    """

    # Least recently used first.
    _order: OrderedDict[str, Resident] = field(default_factory=OrderedDict)
    _loaded: DecayingSums = field(default_factory=lambda: DecayingSums(HALF_LIFE_S))
    _uses: UseCounts = field(default_factory=UseCounts)

    def __contains__(self, digest: str) -> bool:
        return digest in self._order

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def count_load(self, tenant_id: str, weight: float, num_bytes: int) -> None:
        """Record a load on behalf of a tenant."""
        self._loaded.add(tenant_id, num_bytes / weight)

    def note_use(self, digest: str, resident: Resident, tenant_id: str, now: float) -> None:
        """Count a request of an adapter, and make its tenant the owner if it has loaded less than the present owner."""
        self._uses.count(digest, now)
        if tenant_id != resident.owner and self._loaded.of(tenant_id) < self._loaded.of(resident.owner):
            resident.owner = tenant_id

    def add(self, digest: str, resident: Resident, now: float) -> None:
        resident.used_at = now
        self._order[digest] = resident

    def touch(self, digest: str, now: float) -> None:
        """Mark an idle adapter as used now."""
        self._order[digest].used_at = now
        self._order.move_to_end(digest)

    def remove(self, digest: str) -> None:
        del self._order[digest]

    def victim(self, step: int, now: float, *, needs_embedding_head: bool = False) -> str:
        """Return the adapter to evict next. Raises StopIteration if no idle adapter may be evicted in this step.

        needs_embedding_head: only an adapter with LoRA on the embedding or head makes room.
        """

        def eligible(items: Iterable[tuple[str, Resident]]) -> Iterator[tuple[str, str]]:
            for digest, resident in items:
                if resident.asked_in != step and (resident.size.embedding_head_bytes or not needs_embedding_head):
                    yield digest, resident.owner

        oldest, _ = next(eligible(self._order.items()))
        if needs_embedding_head or now - self._order[oldest].used_at > STALE_S:
            return oldest
        owners = dict(islice(eligible(self._order.items()), LOOK_OLDEST))
        owners |= reversed([*islice(eligible(reversed(self._order.items())), LOOK_NEWEST)])
        # Among equally used ones, the least recently used is the first.
        least_used = min(owners, key=self._uses.score)
        loads = {owner: self._loaded.of(owner) for owner in dict.fromkeys(owners.values())}
        heaviest = max(loads, key=loads.__getitem__)
        if loads[heaviest] <= HEAVY_RATIO * loads[owners[least_used]]:
            return least_used
        return min((digest for digest, owner in owners.items() if owner == heaviest), key=self._uses.score)
