"""Reservations of device memory for adapters that do not fit beside those in use. Independent of tensors.

A reservation is a count of pages, not particular pages. Pages that become free go to the oldest reservation first, and
other adapters are placed in the rest. Resident adapters serve new requests as before for `PAGE_WAIT_S`. After that the
reservation is overdue: an idle adapter whose pages are needed serves no new request, and the scheduler may preempt the
requests that hold the other pages. A reservation for which it preempts is placed before all others.

The scheduler may preempt only after `CALM_WAIT_S` if requests were preempted for the same tenant within the last
`CALM_S`, and only after `BUSY_WAIT_S` if the tenant has running requests. With 64 adapters of 8 tenants and room for 8,
preemption after 0.5 s for every reservation caused five times as many loads and longer waits.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

# Age from which a reservation is overdue, and time for which the requests of a new resident are not preempted.
PAGE_WAIT_S = 0.5
# Age below which nothing is preempted for a reservation: CALM_WAIT_S if requests were preempted for the same tenant
# within the last CALM_S, BUSY_WAIT_S if the tenant has running requests. With 5 s for both and a `CALM_S` of 30 s, a
# slow machine preempted three times as often and loaded half as much again, with longer waits (docs/lab-notes.md).
CALM_WAIT_S, BUSY_WAIT_S, CALM_S = 10.0, 20.0, 60.0


@dataclass(slots=True)
class Amount:
    """Device resources that some adapters hold or need."""

    slots: int = 0
    pages: int = 0
    embedding_head_bytes: int = 0

    def add(self, other: "Amount") -> None:
        self.slots += other.slots
        self.pages += other.pages
        self.embedding_head_bytes += other.embedding_head_bytes

    def remove(self, other: "Amount") -> None:
        self.slots -= other.slots
        self.pages -= other.pages
        self.embedding_head_bytes -= other.embedding_head_bytes

    def fits(self, total: "Amount", *held: "Amount") -> bool:
        """Return whether this amount fits into `total` beside the amounts held. Pages and bytes are not compared if
        it needs none.
        """
        slots, pages, num_bytes = self.slots, self.pages, self.embedding_head_bytes
        for other in held:
            slots += other.slots
            pages += other.pages
            num_bytes += other.embedding_head_bytes
        return (
            slots <= total.slots
            and (not self.pages or pages <= total.pages)
            and (not self.embedding_head_bytes or num_bytes <= total.embedding_head_bytes)
        )


@dataclass(frozen=True, slots=True)
class PageReservation:
    """A waiting adapter's claim.

    owner: the tenant whose only reservation it is. asking: the tenants that asked for the adapter in the last step in
    which any did, with their weights, the least served first; tenants without requests for it are left out, and at
    least one remains. since: the time at which it was made.
    """

    digest: str
    owner: str
    asking: tuple[tuple[str, float], ...]
    size: Amount
    since: float

    @property
    def tenant_id(self) -> str:
        """Return the tenant for which requests are preempted, and which pays: the least served one that asks."""
        return self.asking[0][0]

    @property
    def weight(self) -> float:
        """Return the weight of `tenant_id`."""
        return self.asking[0][1]


class Reservations:
    """Reservations in the order in which they are placed: by age, except after `move_to_front`. At most one per tenant,
    and together no more than the device has.
    """

    def __init__(self, total: Amount) -> None:
        self._total = total
        self._queue: OrderedDict[str, PageReservation] = OrderedDict()
        self._overdue: OrderedDict[str, PageReservation] = OrderedDict()
        self._owners: set[str] = set()
        # The tenants that have asked for reserved adapters in this step, with their weights, by digest.
        self._asking: dict[str, dict[str, float]] = {}
        # The tenants that have asked for each reserved adapter in any step and have not left, with their weights.
        self._waiting: dict[str, dict[str, float]] = {}
        # Time of the last preemption for each tenant, oldest first; dropped after `CALM_S`.
        self._preempted: OrderedDict[str, float] = OrderedDict()
        self.reserved, self.reserved_overdue = Amount(), Amount()
        # Number of reservations whose adapter was placed, and the sum of their waits.
        self.num_placed, self.placed_seconds = 0, 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, digest: str) -> bool:
        return digest in self._queue

    def has_tenant(self, tenant_id: str) -> bool:
        """Return whether a request of the tenant has a reservation."""
        return tenant_id in self._owners

    @property
    def overdue(self) -> list[PageReservation]:
        """Return the overdue reservations."""
        return list(self._overdue.values())

    def preempting(self, running: Collection[str], now: float) -> list[PageReservation]:
        """Return the reservations for which requests may be preempted now, each for the least served of the tenants
        that have waited long enough.

        running: the tenants with running requests.
        """
        found = []
        for reservation in self._overdue.values():
            age = now - reservation.since
            patient = (asked for asked in reservation.asking if age >= self._patience(asked[0], running))
            if (first := next(patient, None)) is not None:
                found.append(replace(reservation, asking=(first,)))
        return found

    def _patience(self, tenant_id: str, running: Collection[str]) -> float:
        if tenant_id in running:
            return BUSY_WAIT_S
        return CALM_WAIT_S if tenant_id in self._preempted else PAGE_WAIT_S

    def move_to_front(self, first: Sequence[PageReservation]) -> None:
        """Place these overdue reservations before all others, in this order."""
        for reservation in reversed(first):
            self._queue.move_to_end(reservation.digest, last=False)
            self._overdue.move_to_end(reservation.digest, last=False)

    def note_preemption(self, tenant_id: str, now: float) -> None:
        """Record that requests are preempted for a reservation of this tenant."""
        self._preempted[tenant_id] = now
        self._preempted.move_to_end(tenant_id)

    def __iter__(self) -> Iterator[PageReservation]:
        return iter(list(self._queue.values()))

    def add(self, digest: str, tenant_id: str, weight: float, size: Amount, now: float) -> bool:
        """Add a reservation, and return whether the adapter has one. None is added if the tenant has another, or if the
        device is fully reserved.
        """
        if digest in self._queue:
            return True
        if tenant_id in self._owners or not size.fits(self._total, self.reserved):
            return False
        self._queue[digest] = PageReservation(digest, tenant_id, ((tenant_id, weight),), size, now)
        self._owners.add(tenant_id)
        self._waiting[digest] = {}
        self.ask(digest, tenant_id, weight)
        self.reserved.add(size)
        return True

    def ask(self, digest: str, tenant_id: str, weight: float) -> None:
        """Record a tenant that needs a reserved adapter.

        Requests ask in the order in which they should be served. The reservation acts for all tenants that ask, because
        nothing is preempted for its owner alone if that is ahead of the others.
        """
        self._asking.setdefault(digest, {}).setdefault(tenant_id, weight)
        self._waiting[digest][tenant_id] = weight

    def end_wait(self, reservation: PageReservation, now: float) -> None:
        """Remove a reservation whose adapter is placed now."""
        self.num_placed += 1
        self.placed_seconds += now - reservation.since
        self.remove(reservation.digest)

    def remove(self, digest: str) -> None:
        reservation = self._queue.pop(digest, None)
        if reservation is None:
            return
        self._owners.discard(reservation.owner)
        del self._waiting[digest]
        self._asking.pop(digest, None)
        self.reserved.remove(reservation.size)
        if self._overdue.pop(digest, None) is not None:
            self.reserved_overdue.remove(reservation.size)

    def leave(self, digest: str, tenant_id: str) -> None:
        """Take out a tenant whose last request for the adapter has left. If it owned the reservation, another tenant
        that waits inherits it with its age.

        The reservation ends if each of these owns another one: a tenant whose neighbour reserves and leaves again and
        again would have many.
        """
        found, asked = self._queue.get(digest), self._asking.get(digest, {})
        asked.pop(tenant_id, None)
        if found is None:
            return
        waiting = self._waiting[digest]
        waiting.pop(tenant_id, None)
        asking = asked or {each: weight for each, weight in found.asking if each != tenant_id} or waiting
        owner = found.owner
        if owner == tenant_id:
            heir = next((each for each in asking | waiting if each not in self._owners), None)
            if heir is None:
                self.remove(digest)
                return
            self._owners.discard(tenant_id)
            self._owners.add(heir)
            owner = heir
        self._replace(replace(found, owner=owner, asking=tuple(asking.items())))

    def _replace(self, reservation: PageReservation) -> None:
        for each in (self._queue, self._overdue):
            if reservation.digest in each:
                each[reservation.digest] = reservation

    def begin_step(self, now: float) -> None:
        """Note who asked in the last step, mark the overdue reservations, which are the oldest, and drop preemption
        times older than `CALM_S`.
        """
        for digest, tenants in self._asking.items():
            if tenants and (found := self._queue.get(digest)) is not None:
                self._replace(replace(found, asking=tuple(tenants.items())))
        self._asking.clear()
        while self._preempted and now - next(iter(self._preempted.values())) >= CALM_S:
            self._preempted.popitem(last=False)
        while len(self._overdue) < len(self._queue):
            reservation = next(r for r in self._queue.values() if r.digest not in self._overdue)
            if now - reservation.since < PAGE_WAIT_S:
                return
            self._overdue[reservation.digest] = reservation
            self.reserved_overdue.add(reservation.size)
