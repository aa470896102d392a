"""Fair share between tenants by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024, section 4).

The tenant with the least service per weight goes next. The counter of a tenant that returns from idle is raised to the
least counter of an active tenant, so that idling earns no credit. Knows no blocks and no adapters.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from engine.scheduling.request import Request

# Cost of a token. A decode token costs more, because it takes a whole step of its sequence's time; a prompt token takes
# a share of a batch.
PREFILL_COST = 1.0
DECODE_COST = 2.0


class FairShare:
    """The waiting requests by tenant, and the counter of every tenant."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Request]] = {}
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def num_waiting(self, tenant: str) -> int:
        return len(self._queues.get(tenant, ()))

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def enter(self, request: Request) -> None:
        """Queue a new request. Its tenant is active until `leave`."""
        tenant = request.tenant
        if not self._active.get(tenant):
            least = min((self._counters[t] for t in self._active), default=max(self._counters.values(), default=0.0))
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)
        self._active[tenant] = self._active.get(tenant, 0) + 1
        self.push(request)

    def leave(self, request: Request) -> None:
        """Remove a finished request, waiting or not."""
        self._active[request.tenant] -= 1
        if not self._active[request.tenant]:
            del self._active[request.tenant]
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Drop the counters of idle tenants that are not above the least active counter, to which a returning tenant is
        raised anyway. Without active tenants, every counter restarts at zero.
        """
        if not self._active:
            self._counters.clear()
        elif len(self._counters) > 2 * len(self._active) + 64:
            least = min(self._counters[tenant] for tenant in self._active)
            self._counters = {t: c for t, c in self._counters.items() if t in self._active or c > least}

    def push(self, request: Request, front: bool = False) -> None:
        """Queue a request among its tenant's: lower priority numbers first, then order of arrival."""
        queue = self._queues.setdefault(request.tenant, deque())
        if front:
            queue.appendleft(request)
            return
        at = len(queue)
        while at and queue[at - 1].priority > request.priority:
            at -= 1
        queue.insert(at, request)

    def remove(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(request)
        if not queue:
            del self._queues[request.tenant]

    def charge(self, request: Request, num_tokens: int) -> None:
        """Add computed tokens to the tenant's counter. Cached prompt tokens cost nothing, because they are not
        computed.
        """
        cost = DECODE_COST if request.is_decoding else PREFILL_COST
        self._counters[request.tenant] = self.counter(request.tenant) + num_tokens * cost / request.weight

    def least_served_first(self, in_progress: Iterable[Request] = ()) -> Iterator[Request]:
        """Yield every request with prompt work: the least served tenant's first; within a tenant, prompts in progress,
        then its queue.
        """
        work: dict[str, list[Request]] = {}
        for request in in_progress:
            work.setdefault(request.tenant, []).append(request)
        for tenant, queue in self._queues.items():
            work.setdefault(tenant, []).extend(queue)
        for tenant in sorted(work, key=lambda t: (self.counter(t), work[t][0].arrival)):
            yield from work[tenant]
