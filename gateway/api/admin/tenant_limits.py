"""`/admin/api/tenants/{tenant}/limits`: a tenant's limits with their remaining amounts, for operators."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.access.auth import TenantPrincipal
from gateway.api.key import BudgetLeft, RestOfLimit, budget_left, limits_left
from gateway.api.requests.fields import json_response
from gateway.errors import Unavailable
from gateway.quota.limits import Limit, limits_of
from gateway.quota.quota import Quota
from gateway.quota.remaining_limits import Remaining
from gateway.records.tenants.tenants import Tenants


class TenantLimitsLeft(Struct, frozen=True, kw_only=True):
    """Limits of a tenant, by the name of their kind, and its budget with the least left."""

    object: Literal["tenant.limits"] = "tenant.limits"
    tenant: str
    limits: dict[str, RestOfLimit]
    budget: BudgetLeft | None


class TenantLimits:
    """Route for the limits of a tenant. currency: the budgets' currency."""

    def __init__(self, *, tenants: Tenants, quota: Quota, currency: str) -> None:
        self._tenants = tenants
        self._quota = quota
        self._currency = currency

    async def get(self, request: web.Request) -> web.Response:
        """Return the limits. While Redis or the ledger is unavailable, remaining amounts are null."""
        tenant = await self._tenants.get(request.match_info["tenant"])
        principal = TenantPrincipal(key_id="", tenant=tenant)
        found: Sequence[Remaining | Limit]
        try:
            found = await self._quota.peek(principal)
        except Unavailable:
            found = limits_of(principal, "")
        now = datetime.now(UTC)
        return json_response(
            TenantLimitsLeft(
                tenant=tenant.name,
                limits=limits_left("tenant", found, now, self._currency),
                budget=budget_left(found, now, self._currency),
            )
        )
