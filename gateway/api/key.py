"""`/v1/key`: the key of the request, with the remaining amounts of its limits and of its tenant's."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from gateway.access.auth import TenantPrincipal
from gateway.api.requests.fields import json_response
from gateway.api.scopes import PRINCIPAL
from gateway.errors import Unavailable
from gateway.quota.limits import Limit, limits_of
from gateway.quota.quota import Quota
from gateway.quota.remaining_limits import Remaining
from gateway.sharing.concurrency import ConcurrencyLimiter
from wire.money import exact_money

# Maximum concurrent reads, at most one per tenant, because a read may need sums of the ledger; and a tenant's pause
# after a read, as a factor of its duration.
READS, REST = 8, 1.0


class RestOfLimit(Struct, frozen=True, kw_only=True):
    """A limit and its remaining amount. A budget's amounts are decimals in `currency`.

    remaining: None while Redis is unavailable. resets_at: when the limit is fully available again if nothing more is
    used; for a budget, the end of its period; for a limit on concurrency, None.
    """

    limit: int | str
    remaining: int | str | None
    resets_at: datetime | None
    currency: str | UnsetType = UNSET


class BudgetLeft(Struct, frozen=True, kw_only=True):
    """The budget with the least left. owner: its owner. spent: includes the highest cost of running requests."""

    owner: Literal["key", "tenant"]
    period: str
    limit: str
    spent: str | None
    remaining: str | None
    resets_at: datetime | None
    currency: str


class LimitsLeft(Struct, frozen=True, kw_only=True):
    """Limits by the name of their kind. Those of the key apply in addition to the tenant's."""

    key: dict[str, RestOfLimit]
    tenant: dict[str, RestOfLimit]


class KeyInfo(Struct, frozen=True, kw_only=True):
    """A key. models: names that it may use; None for all of its tenant's."""

    object: Literal["key"] = "key"
    id: str
    label: str
    tenant: str
    scopes: list[str]
    models: Sequence[str] | None
    expires_at: datetime | None
    limits: LimitsLeft
    budget: BudgetLeft | None


class OwnKey:
    """Route for the key of the request. currency: the budgets' currency."""

    def __init__(self, *, quota: Quota, currency: str) -> None:
        self._quota = quota
        self._currency = currency
        self._reads = ConcurrencyLimiter(READS, rest=REST)

    async def get(self, request: web.Request) -> web.Response:
        """Return the key. While Redis or the ledger is unavailable, remaining amounts are null."""
        principal = request[PRINCIPAL]
        left: Sequence[Remaining | Limit]
        async with self._reads.place(principal.tenant.id):
            try:
                left = await self._quota.peek(principal)
            except Unavailable:
                left = limits_of(principal, "")
        return json_response(_describe(principal, left, self._currency))


def _describe(principal: TenantPrincipal, limits: Sequence[Remaining | Limit], currency: str) -> KeyInfo:
    now = datetime.now(UTC)
    return KeyInfo(
        id=principal.key_id,
        label=principal.label,
        tenant=principal.tenant.name,
        scopes=sorted(principal.scopes),
        models=principal.allowed_models,
        expires_at=principal.expires_at,
        limits=LimitsLeft(
            key=limits_left("key", limits, now, currency), tenant=limits_left("tenant", limits, now, currency)
        ),
        budget=budget_left(limits, now, currency),
    )


def limits_left(
    owner: str, limits: Iterable[Remaining | Limit], now: datetime, currency: str
) -> dict[str, RestOfLimit]:
    """Return the limits of "key" or "tenant" by the names of their kinds. A `Limit` has an unknown remaining amount."""
    rests = {}
    for each in limits:
        limit, remaining, at = _parts(each, now)
        if limit.owner == owner:
            is_money = limit.kind.is_budget
            rests[limit.name] = RestOfLimit(
                limit=exact_money(limit.value) if is_money else limit.value,
                remaining=_money(remaining) if is_money else remaining,
                resets_at=at,
                currency=currency if is_money else UNSET,
            )
    return rests


def budget_left(limits: Iterable[Remaining | Limit], now: datetime, currency: str) -> BudgetLeft | None:
    """Return the budget with the least left; None without budgets."""
    budgets = [parts for each in limits if (parts := _parts(each, now))[0].kind.is_budget]
    if not budgets:
        return None
    limit, remaining, at = min(budgets, key=lambda parts: parts[0].value if parts[1] is None else parts[1])
    return BudgetLeft(
        owner="key" if limit.owner == "key" else "tenant",
        period=limit.kind.period or "",
        limit=exact_money(limit.value),
        spent=None if remaining is None else exact_money(limit.value - remaining),
        remaining=_money(remaining),
        resets_at=at,
        currency=currency,
    )


def _parts(each: Remaining | Limit, now: datetime) -> tuple[Limit, int | None, datetime | None]:
    """Return (limit, remaining amount, reset time); the last two are None if unknown."""
    if isinstance(each, Limit):
        return each, None, None
    at = None if each.limit.kind.is_gauge else now + timedelta(milliseconds=each.reset)
    return each.limit, each.remaining, at


def _money(amount: int | None) -> str | None:
    return None if amount is None else exact_money(amount)
