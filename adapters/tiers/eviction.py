"""Eviction order of idle adapters: least recently used, except that a tenant which loads much evicts its own first.

A tenant that cycles through many adapters would otherwise evict a neighbour's only adapter between two of its uses.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from adapters.recent_use import RecentUse
from adapters.tiers.reservations import Amount

# Half-life of the bytes that a tenant has loaded recently, in seconds.
HALF_LIFE_S = 30.0
# An adapter unused for this time is evicted first, regardless of its owner.
STALE_S = 60.0
# A tenant's adapters are not evicted while another tenant with idle adapters has loaded this many times as much.
HEAVY_RATIO = 2.0


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
    """Resident adapters without requests, with the loads of their owners. Each method but `victim` takes O(1)."""

    _order: OrderedDict[str, Resident] = field(default_factory=OrderedDict)
    _by_owner: dict[str, OrderedDict[str, Resident]] = field(default_factory=dict)
    _loaded: RecentUse = field(default_factory=lambda: RecentUse(HALF_LIFE_S))

    def __contains__(self, digest: str) -> bool:
        return digest in self._order

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def count_load(self, tenant: str, weight: float, num_bytes: int) -> None:
        """Record a load on behalf of a tenant."""
        self._loaded.add(tenant, num_bytes / weight)

    def note_user(self, resident: Resident, tenant: str) -> None:
        """Make a tenant the owner if it has loaded less than the present owner."""
        if tenant != resident.owner and self._loaded.of(tenant) < self._loaded.of(resident.owner):
            resident.owner = tenant

    def add(self, digest: str, resident: Resident, now: float) -> None:
        resident.used_at = now
        self._order[digest] = resident
        self._by_owner.setdefault(resident.owner, OrderedDict())[digest] = resident

    def touch(self, digest: str, now: float) -> None:
        """Mark an idle adapter as used now."""
        resident = self._order[digest]
        resident.used_at = now
        self._order.move_to_end(digest)
        self._by_owner[resident.owner].move_to_end(digest)

    def remove(self, digest: str) -> None:
        resident = self._order.pop(digest)
        own = self._by_owner[resident.owner]
        del own[digest]
        if not own:
            del self._by_owner[resident.owner]

    def victim(self, step: int, now: float, *, needs_outside: bool = False) -> str:
        """Return the adapter to evict next. Raises StopIteration if no idle adapter may be evicted in this step.

        needs_outside: only an adapter with LoRA outside the layers makes room.
        """
        oldest = next(
            d for d, r in self._order.items() if r.asked_in != step and (r.size.outside_bytes or not needs_outside)
        )
        resident = self._order[oldest]
        if needs_outside or now - resident.used_at > STALE_S:
            return oldest
        first_of = {owner: next(iter(own.items())) for owner, own in self._by_owner.items()}
        loads = {owner: self._loaded.of(owner) for owner, (_, first) in first_of.items() if first.asked_in != step}
        heaviest = max(loads, key=loads.__getitem__, default=resident.owner)
        is_heavy = loads.get(heaviest, 0.0) > HEAVY_RATIO * self._loaded.of(resident.owner)
        return first_of[heaviest][0] if is_heavy else oldest
