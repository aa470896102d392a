"""Admission while Redis is away, by class of limit: refused, unlimited, or this gateway's share of each limit."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from gateway.quota.demand import Demand
from gateway.quota.fallback import Mode
from gateway.quota.limits import Limit, LimitState
from gateway.quota.local import Grown, LocalLimits
from gateway.quota.refusals import rate_headers, refusal
from gateway.quota.reservation import Reservation
from gateway.records.caches.tenant_cache import TenantCache
from wire.headers import MAX_TOKENS_HEADER

# Maximum number of budgets whose remaining amount is stored, and of a tenant's: each of its keys may have some.
KNOWN_BUDGETS, TENANTS_BUDGETS = 10_000, 1000


class WithoutRedis:
    """Admission by `LORAPLEX_QUOTA_FALLBACK`."""

    def __init__(self, modes: Mapping[str, Mode], gateways: Callable[[], int], admitted: Callable[[str], None]) -> None:
        """modes: mode of each class of limits. gateways: returns the number of live gateways. admitted: called with
        "open" or "local" for each admitted request.
        """
        self.modes = modes
        self._gateways = gateways
        self._admitted = admitted
        self._local = LocalLimits()
        # By tenant's id and field: the budget's remaining amount when Redis last answered.
        self._budgets: TenantCache[str, int] = TenantCache(KNOWN_BUDGETS, TENANTS_BUDGETS)

    def refuses(self, limits: Sequence[Limit]) -> bool:
        """Return whether a request under these limits is refused."""
        return "closed" in ({self.modes[limit.kind.limit_class] for limit in limits} or {self.modes["requests"]})

    def shares(self, tenant_id: str, limits: Sequence[Limit]) -> list[Limit]:
        """Return this gateway's shares of the limits in the mode "local"."""
        return [
            Limit(limit.field, limit.owner, limit.letter, self._share(tenant_id, limit))
            for limit in limits
            if self.modes[limit.kind.limit_class] == "local"
        ]

    def acquire(self, shares: Sequence[Limit], demand: Demand) -> Reservation:
        """Reserve the demand on this gateway's shares. Raises RateLimited."""
        answer = self._local.acquire(shares, demand)
        headers = rate_headers(shares, answer.states, demand.currency)
        if not answer.allowed:
            raise refusal(shares, answer.states, demand, headers)
        self._admitted("local" if shares else "open")
        return reservation(demand, answer.granted, headers, datetime.now(UTC))

    def grow(self, tenant_id: str, request_id: str, used: int, wanted: int, expected: int) -> Grown | None:
        """Grow the hold of a request that was admitted without Redis. Return None for others."""
        return self._local.grow(tenant_id, request_id, used, wanted, expected)

    def settle(self, tenant_id: str, request_id: str, tokens: int, cost: int, *, counts: bool) -> None:
        """Settle the request if it was admitted without Redis; otherwise do nothing."""
        self._local.settle(tenant_id, request_id, tokens, cost, counts=counts)

    def remember_budgets(self, tenant_id: str, limits: Sequence[Limit], states: Sequence[LimitState]) -> None:
        """Store the remaining amount of each budget as Redis reports it. This gateway's share is a part of it."""
        for limit, state in zip(limits, states, strict=True):
            if limit.kind.is_budget:
                self._budgets.put(tenant_id, limit.field, state.remaining)

    def _share(self, tenant_id: str, limit: Limit) -> int:
        whole = self._budgets.get(tenant_id, limit.field) if limit.kind.is_budget else limit.value
        return max(1, (whole or 0) // self._gateways())


def reservation(demand: Demand, granted: int, headers: dict[str, str], admitted_at: datetime) -> Reservation:
    """Return the reservation of a granted demand. granted: completion tokens of all choices together."""
    each = granted // demand.choices
    if each < demand.max_tokens:
        headers = {**headers, MAX_TOKENS_HEADER: str(each)}
    return Reservation(
        request_id=demand.request_id,
        tenant_id=demand.tenant_id,
        tokens=demand.prompt_tokens + granted,
        max_tokens=each,
        headers=headers,
        admitted_at=admitted_at,
        completion=granted,
        cost=demand.price.highest_cost(demand.prompt_tokens, granted),
        currency=demand.currency,
    )
