"""Virtual token counters of the tenants with requests in this process, joined with those of the other processes by
`shared_service.py` (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

A counter is the service that a tenant received, in cost units per weight. The counter of a tenant that returns from
idle is raised to the least counter of an active tenant, so that idling earns no credit. The order of tenants also
counts the service that is expected of admitted requests. Only received service is shared, and raises others' counters:
an expected prompt may come from a cache, and a tenant raised over it would wait for service that nobody received.
"""

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple


class Change(NamedTuple):
    """Part of an exchange: a tenant's weight, its service since the last exchange, and whether it is active here."""

    tenant_id: str
    weight: float
    service: float
    is_active: bool


def _ignore(_tenant_id: str, _service: float) -> None:
    pass


def _ignore_first() -> None:
    pass


class ServiceCounters:
    """Counters of this process. Without exchanges, they count its own service only."""

    def __init__(self) -> None:
        # Called with a tenant's id and each service added.
        self.observe_service: Callable[[str, float], None] = _ignore
        # Called when a tenant enters while none is known.
        self.observe_first: Callable[[], None] = _ignore_first
        # Called with a tenant's id after a change of its counter, or with None after a change of all counters.
        self._watchers: list[Callable[[str | None], None]] = []
        self._requests: Counter[str] = Counter()
        # Tenants with a request since the last exchange: a request may come and go between two of them.
        self._seen: set[str] = set()
        self._weights: dict[str, float] = {}
        # The counter when it was last shared, and the service since then.
        self._shared: dict[str, float] = {}
        self._unshared: dict[str, float] = {}
        # Expected service of admitted requests, in cost units.
        self._expected: dict[str, float] = {}
        self._processes: dict[str, int] = {}
        # Heap of lower bounds of the counters of the tenants with requests here, at least one for each.
        self._lower: list[tuple[float, str]] = []
        # Sums of the weights of the tenants that are active here, and of those that are active in other processes only.
        self._weight_here = 0.0
        self._weight_elsewhere = 0.0

    def watch(self, watcher: Callable[[str | None], None]) -> None:
        """Call `watcher` after each change of counters of tenants with requests: see `_watchers`."""
        self._watchers.append(watcher)

    def enter(self, tenant_id: str, weight: float) -> None:
        """Count a request of the tenant as present, until `leave`."""
        if not self._weights:
            self.observe_first()
        self._weight_here += weight - (self._weights[tenant_id] if tenant_id in self._requests else 0.0)
        if tenant_id not in self._requests:
            unshared = self._unshared.get(tenant_id, 0.0)
            self._shared[tenant_id] = max(self._shared.get(tenant_id, 0.0), self._least() - unshared)
            self._bound(tenant_id)
        self._requests[tenant_id] += 1
        self._seen.add(tenant_id)
        self._weights[tenant_id] = weight

    def leave(self, tenant_id: str) -> None:
        self._requests[tenant_id] -= 1
        if not self._requests[tenant_id]:
            del self._requests[tenant_id]
            self._weight_here -= self._weights[tenant_id]
        if not self._requests:
            self._weight_here = 0.0

    @property
    def number(self) -> int:
        """Return the number of tenants that the next exchange has."""
        return len(self._weights)

    def counter(self, tenant_id: str) -> float:
        """Return the counter by which tenants are ordered, with the expected service."""
        expected = self._expected.get(tenant_id)
        return self.received(tenant_id) + (expected / self._weights[tenant_id] if expected else 0.0)

    def received(self, tenant_id: str) -> float:
        """Return the counter of received service."""
        return self._shared.get(tenant_id, 0.0) + self._unshared.get(tenant_id, 0.0)

    def add_service(self, tenant_id: str, service: float) -> None:
        """Add `service / weight` to the tenant's counter. service: in cost units."""
        self._unshared[tenant_id] = self._unshared.get(tenant_id, 0.0) + service / self._weights[tenant_id]
        for changed in self._watchers:
            changed(tenant_id)
        self.observe_service(tenant_id, service)

    def expect(self, tenant_id: str, change: float) -> None:
        """Change the expected service of the tenant's admitted requests. change: in cost units."""
        self._expected[tenant_id] = self._expected.get(tenant_id, 0.0) + change
        for changed in self._watchers:
            changed(tenant_id)

    def share(self, tenant_id: str) -> float:
        """Return the tenant's part of all engines' places in this process: its weight over the weights of all active
        tenants, divided by the number of processes where it is active.
        """
        weight = self._weight_here + self._weight_elsewhere
        return self._weights[tenant_id] / weight / self._processes.get(tenant_id, 1)

    def changes(self) -> list[Change]:
        """Return the active tenants, those that were active in the last exchange, and all service since then."""
        active = self._seen | self._requests.keys()
        self._seen = set()
        return [
            Change(tenant_id, weight, self._unshared.get(tenant_id, 0.0), tenant_id in active)
            for tenant_id, weight in self._weights.items()
        ]

    def exchanged(self, sent: list[Change], weight_everywhere: float, results: list[tuple[float, int]]) -> None:
        """Apply an exchange's results: for each change that was sent, the tenant's counter and number of processes.

        weight_everywhere: sum of the weights of all active tenants.
        """
        self._weight_elsewhere = max(0.0, weight_everywhere - sum(c.weight for c in sent if c.is_active))
        for change, (counter, processes) in zip(sent, results, strict=True):
            tenant_id = change.tenant_id
            self._shared[tenant_id] = counter
            self._unshared[tenant_id] = self._unshared.get(tenant_id, 0.0) - change.service
            self._processes[tenant_id] = max(1, processes)
            if not change.is_active and tenant_id not in self._seen | self._requests.keys():
                self._forget(tenant_id)
        self._order()
        for changed in self._watchers:
            changed(None)

    def exchange_failed(self) -> None:
        """Share the places among this process's tenants alone until the next exchange.

        Their service is kept for it, unless no tenant is active: then fairness needs no history, and nothing else drops
        the counters.
        """
        self._weight_elsewhere = 0.0
        self._processes.clear()
        if not self._requests:
            for tenant_id in list(self._weights):
                self._forget(tenant_id)

    def _least(self) -> float:
        """Return the least received service per weight of a tenant with requests here; 0 without one.

        The first lower bound is raised until it is its tenant's counter, so a call takes logarithmic time on average.
        """
        while self._lower:
            bound, tenant_id = self._lower[0]
            counter = self.received(tenant_id)
            if tenant_id not in self._requests:
                heappop(self._lower)
            elif bound < counter:
                heapreplace(self._lower, (counter, tenant_id))
            else:
                return counter
        return 0.0

    def _bound(self, tenant_id: str) -> None:
        """Add the tenant's counter as a lower bound, because it is new."""
        heappush(self._lower, (self.received(tenant_id), tenant_id))
        if len(self._lower) > 2 * len(self._requests) + 64:
            self._order()

    def _order(self) -> None:
        self._lower = [(self.received(tenant_id), tenant_id) for tenant_id in self._requests]
        heapify(self._lower)

    def _forget(self, tenant_id: str) -> None:
        for values in (self._weights, self._shared, self._unshared, self._expected, self._processes):
            values.pop(tenant_id, None)
