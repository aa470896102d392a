"""Limits that apply to a request (the tenant's, its key's, its model's), and the amount that it takes of each."""

from collections.abc import Iterator

import msgspec

from gateway.access.auth import TenantPrincipal
from gateway.billing.past import ALL, Part
from gateway.records.catalog import Model
from gateway.records.tenants import ANY_ADAPTER, Limits

# Name of a limit -> letter of its kind in the script (quota.lua) and in `local.py`.
KINDS = {
    "requests_per_minute": "r",
    "tokens_per_minute": "t",
    "tokens_per_day": "d",
    "max_concurrent": "c",
    "max_concurrent_tokens": "o",
    "budget_per_month": "b",
}
# Kinds of a tenant's limits on adapter uploads and deletes; the same script checks them.
ADAPTER_KINDS = {"adapter_changes_per_minute": "m", "max_concurrent_uploads": "u"}
NAMES = {kind: name for name, kind in {**KINDS, **ADAPTER_KINDS}.items()}
# Kinds of which each request, upload or change takes 1, whatever its size.
SINGLE = frozenset("rcmu")
# Class of each kind: the `type` of a refusal. `LORAPLEX_QUOTA_FALLBACK` sets a mode for each class.
CLASSES = {
    "r": "requests",
    "t": "tokens",
    "d": "tokens",
    "c": "concurrency",
    "o": "concurrency",
    "b": "budget",
    "m": "requests",
    "u": "concurrency",
}


class Limit(msgspec.Struct, frozen=True, gc=False):
    """Limit of a tenant. field: its unique key within the tenant, which ends with the kind.

    owner: "tenant", "key" or "model". part: the part of the tenant's usage that counts against it.
    """

    field: str
    owner: str
    kind: str
    value: int
    part: Part = ALL

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    def amount(self, tokens: int, cost: int) -> int:
        """Return the amount that a request with these tokens and this cost takes of the limit."""
        if self.kind in SINGLE:
            return 1
        return cost if self.kind == "b" else tokens


NO_LIMITS = Limits()


def limits_of(principal: TenantPrincipal, model: Model | str) -> tuple[Limit, ...]:
    """Return the limits that apply to a request.

    model: a plain name has the limits of this name only. For an adapter the limits of each of `Model.names` apply, so
    that the same content under another name counts against the same limits; if none of them has limits, those of "*"
    apply.
    """
    name, names = (model, ()) if isinstance(model, str) else (model.name, model.names)
    tenant = principal.tenant
    found = [*_set(tenant.limits, "tenant", "tenant")]
    if principal.key_limits != NO_LIMITS:
        family = principal.key_family
        found += _set(principal.key_limits, "key", f"key:{family}", Part(family=family))
    if tenant.model_limits:
        limited = [name for name in names or (name,) if name in tenant.model_limits]
        for name in limited:
            found += _set(tenant.model_limits[name], "model", f"model:{name}", Part(models=(name,)))
        if names and not limited and ANY_ADAPTER in tenant.model_limits:
            part = Part(besides=tuple(tenant.model_limits))
            found += _set(tenant.model_limits[ANY_ADAPTER], "model", f"model:{ANY_ADAPTER}", part)
    return tuple(found)


def adapter_limits(per_minute: int | None, at_once: int | None) -> tuple[Limit, ...]:
    """Return a tenant's limits on uploads and deletes of adapters. None means unlimited."""
    values = {"m": per_minute, "u": at_once}
    return tuple(Limit(f"tenant:{kind}", "tenant", kind, value) for kind, value in values.items() if value is not None)


def _set(limits: Limits, owner: str, prefix: str, part: Part = ALL) -> Iterator[Limit]:
    for name, kind in KINDS.items():
        value = getattr(limits, name)
        if value is not None:
            yield Limit(f"{prefix}:{kind}", owner, kind, value, part)
