"""Terms of tenants: the values that a plan or a tenant sets, and the effective values of a tenant.

A tenant's own term overrides its plan's, and a plan's overrides the default. `resolve` is the only place that decides
this. Its result is stored in the tenant's columns whenever the tenant or its plan changes, so that every reader of
a tenant (the quota, the scheduler, a gateway of the previous release) gets effective values.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.limits.kinds import KINDS
from gateway.records.tenants.limits import Limits

OnTokenLimit = Literal["refuse", "shorten"]
Source = Literal["tenant", "plan", "default"]
# Shares of a budget at which there is an event.
BUDGET_WARN_AT = (0.8, 1.0)

_LIMITS: Any = msgspec.defstruct(
    "Limits", [(kind.name, int | UnsetType | None, UNSET) for kind in KINDS], frozen=True, kw_only=True
)


class Terms(_LIMITS, msgspec.Struct, frozen=True, kw_only=True):
    """Values that a plan or a tenant sets: a field for each kind of limit, and the following.

    UNSET: not set here. None: not limited, or without a target. budget_warn_at: sorted.
    """

    weight: float | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    ttft_target: float | UnsetType | None = UNSET
    on_token_limit: OnTokenLimit | UnsetType = UNSET
    model_limits: dict[str, Limits] | UnsetType = UNSET
    budget_warn_at: tuple[float, ...] | UnsetType = UNSET


FIELDS: tuple[str, ...] = Terms.__struct_fields__
NO_TERMS = Terms()
DEFAULTS: Mapping[str, Any] = {kind.name: kind.default for kind in KINDS} | {
    "weight": 1.0,
    "priority": 5,
    "ttft_target": None,
    "on_token_limit": "refuse",
    "model_limits": {},
    "budget_warn_at": BUDGET_WARN_AT,
}


def given_terms(terms: Terms) -> dict[str, Any]:
    """Return the terms that are set, by their names."""
    return {name: value for name in FIELDS if (value := getattr(terms, name)) is not UNSET}


def resolve(plan: Terms, own_terms: Terms) -> dict[str, Any]:
    """Return the effective values of a tenant by field. Limits of models are combined by the model's name."""
    values = {**DEFAULTS, **given_terms(plan), **given_terms(own_terms)}
    values["model_limits"] = _of_models(plan) | _of_models(own_terms)
    return values


def sources(plan: Terms, own_terms: Terms) -> dict[str, Source]:
    """Return the source of each effective value."""
    found: dict[str, Source] = dict.fromkeys(FIELDS, "default")
    found.update(dict.fromkeys(given_terms(plan), "plan"))
    found.update(dict.fromkeys(given_terms(own_terms), "tenant"))
    return found


def own_terms(stored: Terms, plan: Terms, effective: Mapping[str, Any]) -> Terms:
    """Return a tenant's own terms. effective: the values in its columns.

    A value that does not follow from the stored terms was set by a gateway of the previous release, which knows no
    plans. It counts as the tenant's own.
    """
    expected = resolve(plan, stored)
    changed = {name: effective[name] for name in FIELDS if effective[name] != expected[name]}
    if "model_limits" in changed:
        of_plan = _of_models(plan)
        changed["model_limits"] = {
            model: limits for model, limits in changed["model_limits"].items() if of_plan.get(model) != limits
        }
    return msgspec.structs.replace(stored, **changed) if changed else stored


def read_terms(stored: str | None) -> Terms:
    return NO_TERMS if stored is None else msgspec.json.decode(stored, type=Terms)


def write_terms(terms: Terms) -> str:
    return msgspec.json.encode(terms).decode()


def _of_models(terms: Terms) -> dict[str, Limits]:
    return {} if isinstance(terms.model_limits, UnsetType) else terms.model_limits
