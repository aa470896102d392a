"""Costs in reports: exact decimals beside micro-units."""

from typing import Any

import msgspec

from wire.money import exact_money


def with_money(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures in which each `cost` is an exact decimal, and in micro-units `cost_micros`, at any depth.

    A curve of costs is in micro-units only.
    """
    found = {name: _inside(value) for name, value in figures.items()}
    if "cost" in found:
        cost = found.pop("cost")
        found |= {"cost_micros": cost} if isinstance(cost, list) else {"cost": exact_money(cost), "cost_micros": cost}
    return found


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return with_money(value)
    if isinstance(value, list):
        # A list of figures by step has None for a step without any.
        return [with_money(item) if isinstance(item, dict) else item for item in value]
    return value


def priced_struct(name: str, of: type[msgspec.Struct], hidden: tuple[str, ...] = (), **more: Any) -> Any:
    """Return the struct of a record in an answer: with its cost as an exact decimal, and in micro-units `cost_micros`.

    hidden: fields to leave out. more: types of further fields.
    """
    fields: list[Any] = []
    for field in msgspec.structs.fields(of):
        if field.name not in (*hidden, "cost"):
            has_default = field.default is not msgspec.NODEFAULT
            fields.append((field.name, field.type, field.default) if has_default else (field.name, field.type))
    fields += [("cost", str), ("cost_micros", int), *more.items()]
    omit = of.__struct_config__.omit_defaults
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, omit_defaults=omit)


def priced(kind: Any, record: Any, **more: Any) -> Any:
    """Return a record as `kind`, a struct of `priced_struct`."""
    more |= {"cost": exact_money(record.cost), "cost_micros": record.cost}
    kept = {name: getattr(record, name) for name in kind.__struct_fields__ if name not in more}
    return kind(**kept, **more)
