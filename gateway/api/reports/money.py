"""Costs in reports: exact decimals beside micro-units."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from wire.money import exact_money

Money = Annotated[str, Meta(description="An exact decimal in the currency.")]
Micros = Annotated[int, Meta(description="The cost in micro-units of the currency.")]


def priced_struct(
    name: str, record_type: type[msgspec.Struct], text: str, hidden: tuple[str, ...] = (), **more: Any
) -> Any:
    """Return the struct of a record in an answer: with its cost as an exact decimal, and in micro-units `cost_micros`.

    text: its description. hidden: fields to leave out. more: types of further fields.
    """
    fields: list[Any] = []
    for field in msgspec.structs.fields(record_type):
        if field.name not in (*hidden, "cost"):
            has_default = field.default is not msgspec.NODEFAULT
            fields.append((field.name, field.type, field.default) if has_default else (field.name, field.type))
    fields += [("cost", Money), ("cost_micros", Micros), *more.items()]
    omit, namespace = record_type.__struct_config__.omit_defaults, {"__doc__": text}
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, omit_defaults=omit, namespace=namespace)


def priced(kind: Any, record: Any, **more: Any) -> Any:
    """Return a record as `kind`, a struct of `priced_struct`."""
    more |= {"cost": exact_money(record.cost), "cost_micros": record.cost}
    kept = {name: getattr(record, name) for name in kind.__struct_fields__ if name not in more}
    return kind(**kept, **more)
