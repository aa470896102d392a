"""Limits that apply to a request (the tenant's, its key's, its model's), and the amount that it takes of each."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from gateway.access.auth import TenantPrincipal
from gateway.limits.kinds import BY_LETTER, REQUEST_KINDS, UPLOAD_KINDS, Kind
from gateway.records.adapters.catalog import Model
from gateway.records.past_usage import ALL, UsagePart
from gateway.records.tenants.limits import AdapterLimits, Limits
from gateway.records.tenants.tenants import ANY_ADAPTER


class Limit(msgspec.Struct, frozen=True, gc=False):
    """Limit of a tenant. field: its unique key within the tenant, which ends with its letter.

    owner: "tenant", "key" or "model". letter: that of its kind (`kinds.BY_LETTER`). part: the part of the tenant's
    usage that counts against it.
    """

    field: str
    owner: str
    letter: str
    value: int
    part: UsagePart = ALL

    @property
    def kind(self) -> Kind:
        return BY_LETTER[self.letter]

    @property
    def name(self) -> str:
        return self.kind.name

    def amount(self, tokens: int, cost: int) -> int:
        """Return the amount that a request with these tokens and this cost takes of the limit."""
        if self.kind.takes_one:
            return 1
        return cost if self.kind.is_budget else tokens


NO_LIMITS = Limits()


def limits_of(principal: TenantPrincipal, model: Model | str) -> tuple[Limit, ...]:
    """Return the limits that apply to a request.

    model: a plain name has the limits of this name only. The limits of each of `Model.names` apply to an adapter, so
    that the same content under another name counts against the same limits; if none of them has limits, those of "*"
    apply. A mixture has the limits of all its parts.
    """
    parts = [(model,)] if isinstance(model, str) else [m.names or (m.name,) for m in model.parts or (model,)]
    is_adapter = not isinstance(model, str) and bool(model.names)
    tenant = principal.tenant
    found = [*_set(tenant.limits, "tenant", "tenant")]
    if principal.key_limits != NO_LIMITS:
        family = principal.key_family
        found += _set(principal.key_limits, "key", f"key:{family}", UsagePart(family=family))
    if tenant.model_limits:
        limited = [[name for name in names if name in tenant.model_limits] for names in parts]
        for name in dict.fromkeys(name for names in limited for name in names):
            found += _set(tenant.model_limits[name], "model", f"model:{name}", UsagePart(models=(name,)))
        if is_adapter and not all(limited) and ANY_ADAPTER in tenant.model_limits:
            part = UsagePart(besides=tuple(tenant.model_limits))
            found += _set(tenant.model_limits[ANY_ADAPTER], "model", f"model:{ANY_ADAPTER}", part)
    return tuple(found)


class LimitState(NamedTuple):
    """State of a limit after a request was admitted or refused, in requests, tokens or money.

    wait: ms until it has room for the request. reset: ms until all of it is available. reserved: the amount that would
    remain in addition if running requests used nothing more.
    """

    remaining: int
    wait: int
    reset: int
    reserved: int


def upload_limits(limits: AdapterLimits, *, is_change: bool = True, is_upload: bool = True) -> tuple[Limit, ...]:
    """Return a tenant's limits that apply to an upload or deletion of an adapter.

    is_change: whether it counts against the rates of changes. is_upload: whether it takes a slot and bytes.
    """
    found = []
    for kind in UPLOAD_KINDS:
        is_of_changes = kind.takes_one and not kind.is_gauge
        if (is_change if is_of_changes else is_upload) and (value := getattr(limits, kind.name)) is not None:
            found.append(Limit(f"tenant:{kind.letter}", "tenant", kind.letter, value))
    return tuple(found)


def _set(limits: Limits, owner: str, prefix: str, part: UsagePart = ALL) -> Iterator[Limit]:
    for kind in REQUEST_KINDS:
        value = getattr(limits, kind.name)
        if value is not None:
            yield Limit(f"{prefix}:{kind.letter}", owner, kind.letter, value, part)
