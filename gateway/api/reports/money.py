"""Costs in reports: exact decimals beside micro-units."""

import inspect
from typing import Any

import msgspec

from wire.money import exact_money


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
    omit, text = of.__struct_config__.omit_defaults, {"__doc__": inspect.getdoc(of)}
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, omit_defaults=omit, namespace=text)


def priced(kind: Any, record: Any, **more: Any) -> Any:
    """Return a record as `kind`, a struct of `priced_struct`."""
    more |= {"cost": exact_money(record.cost), "cost_micros": record.cost}
    kept = {name: getattr(record, name) for name in kind.__struct_fields__ if name not in more}
    return kind(**kept, **more)
