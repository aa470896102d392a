"""Adapters that own device pages, by state: copying, unused, idle or pinned.

Owns the pages, the slots, and the sums of what each state holds. Independent of tensors, threads and reservations.
"""

import math
from collections import OrderedDict
from collections.abc import Set

from adapters.tiers.eviction import IdleAdapters, Resident
from adapters.tiers.reservations import PAGE_WAIT_S, Amount


class Residents:
    """Resident adapters.

    pinned: amount that adapters with running requests hold. new: amount of those that are copied or unused. held:
    amount of all. asked: amount of the idle ones that a request of this step asked for; a later request of the step
    does not evict them. version: incremented when the set of readable adapters changes.
    """

    def __init__(self, total: Amount, now: float) -> None:
        self.by_digest: dict[str, Resident] = {}
        self.copying: dict[str, Resident] = {}
        # An unused adapter is copied, but not pinned yet. It is not evicted for `PAGE_WAIT_S`: two adapters that wait
        # for the same pages could evict each other before either is used.
        self.unused: OrderedDict[str, Resident] = OrderedDict()
        self.idle = IdleAdapters()
        self.pinned, self.new, self.held, self.asked = Amount(), Amount(), Amount(), Amount()
        self.free_pages = list(range(total.pages - 1, -1, -1))
        self.free_slots = list(range(total.slots - 1, -1, -1))
        self.version = 0
        self.step, self.now = 0, now

    def begin_step(self, now: float) -> None:
        self.step, self.now, self.asked = self.step + 1, now, Amount()

    def readable(self) -> list[str]:
        """Return the adapters whose pages can be read now."""
        return [digest for digest in self.by_digest if digest not in self.copying]

    def readable_among(self, digests: Set[str | None]) -> list[str]:
        """Return those of the digests that are readable. Takes time by the smaller of the two sets."""
        found = self.by_digest.keys() & digests
        return [digest for digest in found if digest is not None and digest not in self.copying]

    def add(self, digest: str, size: Amount, owner: str) -> Resident:
        """Assign free pages and a free slot to an adapter, which is copied from now on."""
        pages = [self.free_pages.pop() for _ in range(size.pages)]
        resident = Resident(self.free_slots.pop(), pages, size, owner=owner)
        self.by_digest[digest] = self.copying[digest] = resident
        self.new.add(size)
        self.held.add(size)
        return resident

    def end_copy(self, digest: str) -> None:
        """Make a copied adapter readable. It is unused then."""
        resident = self.unused[digest] = self.copying.pop(digest)
        resident.ready_at = self.now
        self.version += 1

    def drop_copy(self, digest: str) -> Resident:
        """Free the pages of an adapter whose copy failed."""
        resident = self.copying.pop(digest)
        self.new.remove(resident.size)
        return self._free(digest)

    def make_idle(self, digest: str) -> None:
        """Make an unused adapter idle, so that it can be evicted."""
        resident = self.unused.pop(digest, None)
        if resident is not None:
            self.new.remove(resident.size)
            self.idle.add(digest, resident, self.now)

    def end_unused(self) -> None:
        """Make the adapters idle that have been unused for `PAGE_WAIT_S`."""
        while self.unused and (first := next(iter(self.unused.items())))[1].ready_at <= self.now - PAGE_WAIT_S:
            self.make_idle(first[0])

    def ask(self, digest: str) -> None:
        """Record that a request of this step asked for an idle adapter."""
        resident = self.by_digest[digest]
        self.idle.touch(digest, self.now)
        if resident.asked_in != self.step:
            resident.asked_in = self.step
            self.asked.add(resident.size)

    def pin(self, digest: str, tenant_id: str) -> int:
        """Pin a readable adapter for a request of the tenant, and return its slot."""
        resident = self.by_digest[digest]
        if not resident.pins:
            self.make_idle(digest)
            self._leave_idle(digest, resident)
            self.pinned.add(resident.size)
        resident.pins += 1
        self.idle.note_use(digest, resident, tenant_id, self.now)
        return resident.slot

    def unpin(self, digest: str) -> None:
        """Remove one pin. An adapter without pins is idle."""
        resident = self.by_digest[digest]
        resident.pins -= 1
        if not resident.pins:
            self.idle.add(digest, resident, self.now)
            self.pinned.remove(resident.size)

    def evict(self, digest: str) -> Resident | None:
        """Free the pages of an adapter that is unused or idle. Return None for another, which keeps its pages."""
        resident = self.by_digest[digest]
        if resident.pins or resident.ready_at == math.inf:
            return None
        self.make_idle(digest)
        self._leave_idle(digest, resident)
        return self._free(digest)

    def _leave_idle(self, digest: str, resident: Resident) -> None:
        self.idle.remove(digest)
        if resident.asked_in == self.step:
            self.asked.remove(resident.size)
            resident.asked_in = -1

    def _free(self, digest: str) -> Resident:
        resident = self.by_digest.pop(digest)
        self.held.remove(resident.size)
        self.free_pages.extend(reversed(resident.pages))
        self.free_slots.append(resident.slot)
        self.version += 1
        return resident
