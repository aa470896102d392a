"""Fair-share accounts of tenants, with their waiting requests, shared by the policies."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from operator import attrgetter

from engine.scheduling.request import Request

# Length of a window of the reported shares, which cover the current window and the one before it.
WINDOW_S = 30.0

# Wait after which service at other engines no longer delays the first request of a tenant with nothing running here.
ELSEWHERE_WAIT_S = 5.0

# Time for which a tenant counts as waiting although all of its waiting requests lack their adapters' pages. It bounds
# the credit that a request for an adapter without room earns for its tenant's others.
BLOCKED_S = 5.0

_order_key = attrgetter("order_key")

OnDeviceAmong = Callable[[Set[str | None]], Collection[str | None]]
"""Select those of the adapters (None: the base model) that are on the device."""


def every_adapter(adapters: Set[str | None]) -> Collection[str | None]:
    """Return all of the adapters."""
    return adapters


@dataclass(frozen=True, slots=True)
class FairShareSnapshot:
    """Snapshot of a tenant's fair-share account.

    counter: service divided by weight, since the tenant was last idle. oldest_wait: longest wait of its waiting
    requests in this engine's queue, in seconds. share: its part of the service of the last minute. entitled: its
    weight's part of the weights of the active tenants. goodput: the part of its sequences with a target, of the
    last minute, whose first token came in time; None without such sequences.
    """

    tenant_id: str
    weight: float
    counter: float
    running: int
    waiting: int
    oldest_wait: float
    share: float
    entitled: float
    goodput: float | None


@dataclass(slots=True)
class FairShareAccount:
    """Fair-share account of one tenant: its counter, its recent service and its waiting requests.

    num_active: its requests, waiting and running. waiting_since: time at which it began to wait, or was last raised as
    if it did. queue: its waiting requests in order. by_adapter: the same, for each adapter and for the base model
    (None). elsewhere: part of its lead over the least served that other engines' service caused.
    recent, before: service in the current window and in the one before it; num_met, num_missed: sequences within and
    beyond their target, in the same windows.
    """

    tenant_id: str
    counter: float = 0.0
    weight: float = 1.0
    num_active: int = 0
    waiting_since: float = -inf
    queue: list[Request] = field(default_factory=list)
    by_adapter: dict[str | None, list[Request]] = field(default_factory=dict)
    elsewhere: float = 0.0
    recent: float = 0.0
    before: float = 0.0
    num_met: tuple[int, int] = (0, 0)
    num_missed: tuple[int, int] = (0, 0)

    @property
    def num_running(self) -> int:
        return self.num_active - len(self.queue)

    @property
    def goodput(self) -> float | None:
        met, missed = sum(self.num_met), sum(self.num_missed)
        return met / (met + missed) if met + missed else None


class Tenants:
    """The accounts and waiting requests of all tenants.

    The counter of a tenant that begins to wait is raised to the least counter of the waiting tenants. If none waits, it
    is raised to that of the tenant whose request last left the queue (VTC, algorithm 2, lines 6 to 14), or to the least
    counter of the running tenants if that is more: long streams are served on after the last request has left the
    queue. Idling and low demand therefore earn at most `credit`. A tenant with nothing running whose waiting requests
    have all lacked their adapters' pages could not be served: after `BLOCKED_S` it does not count as waiting.

    credit: service per weight by which a tenant that begins to wait may stay below that counter. The credits of tenants
    that begin to wait one after the other do not add up.
    """

    def __init__(self, credit: float = 0.0) -> None:
        self.accounts: dict[str, FairShareAccount] = {}
        self.waiting: dict[str, FairShareAccount] = {}
        # The tenants that wait for each adapter, and for the base model (None).
        self.waiting_for: dict[str | None, set[str]] = {}
        self._num_waiting = 0
        self._num_active = 0
        self._last_admitted = 0.0
        self._last_tenant: FairShareAccount | None = None
        self._window_began = 0.0
        self._credit = credit
        self._highest_frontier = 0.0

    def __len__(self) -> int:
        return self._num_waiting

    def num_waiting(self, tenant_id: str) -> int:
        account = self.waiting.get(tenant_id)
        return 0 if account is None else len(account.queue)

    def counter(self, tenant_id: str) -> float:
        account = self.accounts.get(tenant_id)
        return 0.0 if account is None else account.counter

    def enter(self, request: Request, now: float, on_device_among: OnDeviceAmong = every_adapter) -> None:
        account = self.accounts.get(request.tenant_id)
        if account is None:
            account = self.accounts[request.tenant_id] = FairShareAccount(request.tenant_id)
        if not on_device_among(account.by_adapter.keys()) and now - account.waiting_since > BLOCKED_S:
            frontier = self._frontier(account, now, on_device_among)
            least = self._least_counter(frontier)
            account.waiting_since = now
            if account.counter <= frontier:
                account.counter, account.elsewhere = max(account.counter, least), 0.0
        self._num_active += not account.num_active
        account.num_active += 1
        account.weight = request.weight
        self._roll(now)
        self.push(account, request, now)

    def push(self, account: FairShareAccount, request: Request, now: float) -> None:
        request.queued_at = now
        if not account.queue:
            account.waiting_since = now
        insort(account.queue, request, key=_order_key)
        insort(account.by_adapter.setdefault(request.adapter_digest, []), request, key=_order_key)
        self.waiting_for.setdefault(request.adapter_digest, set()).add(account.tenant_id)
        self.waiting[account.tenant_id] = account
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        account, adapter = self.waiting[request.tenant_id], request.adapter_digest
        _delete(account.queue, request)
        _delete(account.by_adapter[adapter], request)
        if not account.by_adapter[adapter]:
            del account.by_adapter[adapter]
            self.waiting_for[adapter].remove(account.tenant_id)
            if not self.waiting_for[adapter]:
                del self.waiting_for[adapter]
        self._num_waiting -= 1
        self._last_tenant = account
        if not account.queue:
            account.waiting_since = -inf
            del self.waiting[request.tenant_id]

    def leave(self, request: Request) -> None:
        account = self.accounts[request.tenant_id]
        account.num_active -= 1
        if not account.num_active:
            self._num_active -= 1
            self._forget_idle()

    def add_service(self, request: Request, cost: float) -> None:
        account = self.accounts[request.tenant_id]
        account.counter += cost / request.weight
        account.recent += cost

    def add_tenant_service(self, tenant_id: str, cost: float) -> None:
        account = self.accounts.get(tenant_id)
        if account is not None:
            account.counter += cost / account.weight
            account.recent += cost

    def add_service_elsewhere(self, costs: Mapping[str, float], now: float) -> int:
        present = [(self.accounts[tenant_id], cost) for tenant_id, cost in costs.items() if tenant_id in self.accounts]
        present = [(account, cost) for account, cost in present if account.num_active]
        least = self._least_active()
        for account, cost in present:
            # A tenant that is not ahead has no debt left from either engine.
            account.elsewhere = min(account.elsewhere, _lead(account, least)) + cost / account.weight
            account.counter += cost / account.weight
        self.forgive_elsewhere(now)
        return len(present)

    def forgive_elsewhere(self, now: float) -> None:
        """Forgive the debts for service elsewhere of the tenants that have nothing running and have waited long.

        Without this, a tenant that is served faster elsewhere would never be served here. Its debt for the service of
        this engine stays. A lead over tenants without waiting requests is forgiven too, because running streams do not
        give way.
        """
        late = [
            account
            for account in self.waiting.values()
            if account.elsewhere and not account.num_running and now - account.queue[0].queued_at > ELSEWHERE_WAIT_S
        ]
        least = self._least_active() if late else []
        for account in late:
            account.counter -= min(account.elsewhere, _lead(account, least))
            account.elsewhere = 0.0

    def _least_active(self) -> list[FairShareAccount]:
        """Return the two least served tenants with requests, or fewer."""
        active = (account for account in self.accounts.values() if account.num_active)
        return nsmallest(2, active, key=attrgetter("counter"))

    def count_target(self, tenant_id: str, *, is_met: bool) -> None:
        account = self.accounts.get(tenant_id)
        if account is not None:
            account.num_met = account.num_met[0] + is_met, account.num_met[1]
            account.num_missed = account.num_missed[0] + (not is_met), account.num_missed[1]

    def snapshots(self, running: Sequence[Request], now: float, limit: int) -> list[FairShareSnapshot]:
        """Return snapshots of the accounts with most waiting requests, then most service, at most `limit`."""
        self._roll(now)
        shown = sorted(self.accounts.values(), key=lambda a: (-len(a.queue), -a.recent - a.before))[:limit]
        seats = Counter(r.tenant_id for r in running)
        served = sum(a.recent + a.before for a in self.accounts.values()) or 1.0
        weights = sum(a.weight for a in self.accounts.values() if a.num_active) or 1.0
        return [
            FairShareSnapshot(
                a.tenant_id,
                a.weight,
                a.counter,
                seats[a.tenant_id],
                len(a.queue),
                max((now - r.queued_at for r in a.queue), default=0.0),
                (a.recent + a.before) / served,
                a.weight / weights if a.num_active else 0.0,
                a.goodput,
            )
            for a in shown
        ]

    def _frontier(
        self,
        entering: FairShareAccount | None = None,
        now: float = -inf,
        on_device_among: OnDeviceAmong = every_adapter,
    ) -> float:
        """Return the frontier: the counter to which a tenant without credit is raised when it begins to wait.

        It is the least counter of the waiting tenants. If none waits, it is the last admitted tenant's, or the least of
        the running tenants if that is more. entering: account of the tenant that begins to wait, which does not count.
        now, on_device_among: find the waiting tenants that count (see `Tenants`).
        """
        ready = set[str]().union(*[self.waiting_for[adapter] for adapter in on_device_among(self.waiting_for.keys())])
        others = [account for account in self.accounts.values() if account is not entering]
        waiting = [
            a.counter
            for a in others
            if a.queue and (a.num_running or a.tenant_id in ready or now - a.waiting_since <= BLOCKED_S)
        ]
        if waiting:
            return min(waiting)
        if self._last_tenant is not None:
            self._last_admitted = max(self._last_admitted, self._last_tenant.counter)
        return max(self._last_admitted, min([a.counter for a in others if a.num_running], default=0.0))

    def _least_counter(self, frontier: float) -> float:
        """Return the counter to which a tenant is raised when it begins to wait.

        The credit is subtracted from the highest frontier so far, because waiting tenants with unused credit lower the
        present frontier.
        """
        self._highest_frontier = max(self._highest_frontier, frontier)
        return min(frontier, self._highest_frontier - self._credit)

    def _forget_idle(self) -> None:
        """Drop the accounts of idle tenants that are not above the counter to which a returning tenant is raised
        anyway. Without active tenants, every counter restarts at zero.
        """
        if not self._num_active:
            self.accounts.clear()
            self._last_tenant, self._last_admitted, self._highest_frontier = None, 0.0, 0.0
        elif len(self.accounts) > 2 * self._num_active + 64:
            least = self._least_counter(self._frontier())
            self.accounts = {t: a for t, a in self.accounts.items() if a.num_active or a.counter > least}

    def _roll(self, now: float) -> None:
        """Begin a new window of the reported shares when the current one is full."""
        if now - self._window_began >= WINDOW_S:
            is_next = now - self._window_began < 2 * WINDOW_S
            for account in self.accounts.values():
                account.before, account.recent = account.recent if is_next else 0.0, 0.0
                account.num_met = 0, account.num_met[0] * is_next
                account.num_missed = 0, account.num_missed[0] * is_next
            self._window_began = now


def _lead(account: FairShareAccount, least: Sequence[FairShareAccount]) -> float:
    """Return how far a tenant is ahead of the least served other one; 0 without others. least: the two least served."""
    others = [other.counter for other in least if other is not account]
    return max(0.0, account.counter - others[0]) if others else 0.0


def _delete(queue: list[Request], request: Request) -> None:
    """Remove a request from a list that is sorted by order key."""
    at = bisect_left(queue, request.order_key, key=_order_key)
    while queue[at] is not request:
        at += 1
    del queue[at]


class TenantPolicy:
    """Base of policies: the part of `Policy` that does not depend on the order of requests. credit: see `Tenants`."""

    def __init__(self, credit: float = 0.0) -> None:
        self._tenants = Tenants(credit)

    def __len__(self) -> int:
        return len(self._tenants)

    def num_waiting(self, tenant_id: str) -> int:
        return self._tenants.num_waiting(tenant_id)

    def counter(self, tenant_id: str) -> float:
        return self._tenants.counter(tenant_id)

    def remove(self, request: Request) -> None:
        self._tenants.remove(request)

    def leave(self, request: Request) -> None:
        self._tenants.leave(request)

    def add_service(self, request: Request, cost: float) -> None:
        self._tenants.add_service(request, cost)

    def add_tenant_service(self, tenant_id: str, cost: float) -> None:
        self._tenants.add_tenant_service(tenant_id, cost)

    def add_service_elsewhere(self, costs: Mapping[str, float], now: float) -> int:
        return self._tenants.add_service_elsewhere(costs, now)

    def forgive_elsewhere(self, now: float) -> None:
        self._tenants.forgive_elsewhere(now)

    def count_target(self, request: Request, *, is_met: bool) -> None:
        self._tenants.count_target(request.tenant_id, is_met=is_met)

    def tenants(self, running: Sequence[Request], now: float, limit: int) -> list[FairShareSnapshot]:
        return self._tenants.snapshots(running, now, limit)
