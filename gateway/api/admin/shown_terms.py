"""Terms in answers: the effective values of a tenant or a plan by field, with their sources."""

from typing import Annotated, Any

from msgspec import Meta, Struct, defstruct

from gateway.limits.kinds import KINDS, Kind
from gateway.records.tenants.limits import Limits
from gateway.records.tenants.terms import FIELDS, OnTokenLimit


def _limit(kind: Kind) -> Any:
    unit = ", in micro-units" if kind.takes == "cost" else ""
    return Annotated[int | None, Meta(description=f"{kind.help}{unit}; null: none.")]


def _described(kind: Any, text: str) -> Any:
    return Annotated[kind, Meta(description=text)]


_TYPES: dict[str, Any] = {kind.name: _limit(kind) for kind in KINDS} | {
    "weight": float,
    "priority": int,
    "ttft_target": _described(float | None, "Target of the time to first token in seconds; null: none."),
    "on_token_limit": OnTokenLimit,
    "model_limits": _described(dict[str, Limits], "Further limits by the model's name, without unlimited ones."),
    "budget_warn_at": _described(tuple[float, ...], "Shares of a budget at which there is an event, from 0 to 1."),
}


def with_terms(head: type[Struct]) -> Any:
    """Return a struct with the fields of `head` and then the terms, as the base of an answer's struct."""
    return defstruct("Terms", [(name, _TYPES[name]) for name in FIELDS], bases=(head,), frozen=True, kw_only=True)
