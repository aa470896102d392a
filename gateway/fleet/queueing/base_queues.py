"""Queues of the base models: a request waits only behind requests for the same base model.

All queues share the tenants' counters, so a tenant has one share over all bases.
"""

from collections.abc import Callable

from gateway.fleet.queueing.queue import Capacity, RequestQueue, TenantPlaces
from gateway.fleet.queueing.service_counters import ServiceCounters


class BaseQueues:
    """Queues (`RequestQueue`) of the base models, each created by its first request.

    capacity: returns the current capacity of the engines of a base model, given its id.
    """

    def __init__(
        self,
        capacity: Callable[[str], Capacity | None],
        counters: ServiceCounters,
        max_waiting: int,
        max_seconds: float,
    ) -> None:
        self._capacity = capacity
        self._counters = counters
        self._limits = max_waiting, max_seconds
        self._queues: dict[str, RequestQueue] = {}
        # Callback with the meaning of that of `RequestQueue`.
        self.observe_wait: Callable[[float], None] = lambda _: None

    def of(self, base: str) -> RequestQueue:
        """Return the queue of a base model. base: its id."""
        queue = self._queues.get(base)
        if queue is None:
            queue = self._queues[base] = RequestQueue(lambda: self._capacity(base), self._counters, *self._limits)
            queue.observe_wait = self._observe_wait
        return queue

    def _observe_wait(self, seconds: float) -> None:
        self.observe_wait(seconds)

    @property
    def inside(self) -> int:
        return sum(queue.inside for queue in self._queues.values())

    @property
    def waiting(self) -> int:
        return sum(queue.waiting for queue in self._queues.values())

    @property
    def longest_wait(self) -> float:
        """Return the longest wait of the waiting requests, in seconds."""
        return max((queue.longest_wait for queue in self._queues.values()), default=0.0)

    def count_service(self) -> None:
        """Add to the tenants' service what engines have computed since the last call, by their reports."""
        for queue in self._queues.values():
            queue.count_service()

    def admit(self) -> None:
        """Admit as many waiting requests as there is room for."""
        for queue in self._queues.values():
            queue.admit()

    def tenants(self) -> dict[str, TenantPlaces]:
        """Return the tenants with requests in a queue or on an engine, by id, with their sums over the base models."""
        found: dict[str, TenantPlaces] = {}
        for queue in self._queues.values():
            for tenant_id, row in queue.tenants().items():
                other = found.get(tenant_id)
                found[tenant_id] = row if other is None else _sum(row, other)
        return found


def _sum(row: TenantPlaces, other: TenantPlaces) -> TenantPlaces:
    return row._replace(
        share=row.share + other.share,
        inside=row.inside + other.inside,
        waiting=row.waiting + other.waiting,
        waited=max(row.waited, other.waited),
    )
