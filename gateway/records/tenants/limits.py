"""Limits of tenants, keys, models and adapters.

The database stores limits of requests in one column, as a JSON object by the kinds' names, and those of adapters in
another. Gateways of the previous release read and write one column for each kind of request limit (FORMER_COLUMNS).
This release writes these columns too, and prefers their values when it reads: if they differ from the JSON, an older
gateway has changed them. The next release can drop them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Row, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from gateway.limits.kinds import ADAPTER_KINDS, ALERT_KINDS, REQUEST_KINDS, Kind
from gateway.records.sql.tables import FORMER_COLUMNS, tenants


def limit_fields(kinds: tuple[Kind, ...], *, defaults: bool) -> Any:
    """Return a Struct with a field `int | None` for each kind, as the base of a class that inherits its options.

    defaults: use the kinds' defaults instead of None, and encode fields that are equal to them.
    """
    fields = [(kind.name, int | None, kind.default if defaults else None) for kind in kinds]
    return msgspec.defstruct("Fields", fields, frozen=True, kw_only=True, omit_defaults=not defaults)


_Fields: Any = limit_fields(REQUEST_KINDS, defaults=False)


class Limits(_Fields):
    """Limits of a tenant, or of one of its keys or models: a field for each kind of limit. None: not limited.

    Tokens are prompt and completion tokens together; budgets are in micro-units of the deployment's currency.
    """


_SoftFields: Any = limit_fields(ALERT_KINDS, defaults=False)


class SoftBudgets(_SoftFields):
    """Soft budgets of a tenant in micro-units: a field for each of ALERT_KINDS. None: there is none.

    They share the column of the limits.
    """


_AdapterFields: Any = limit_fields(ADAPTER_KINDS, defaults=True)


class AdapterLimits(_AdapterFields):
    """Limits of a tenant's adapters: a field for each of ADAPTER_KINDS. None: not limited.

    max_adapter_bytes: size of all versions on record, in the files' own dtypes. Removed versions that are not collected
    yet have room beyond it (`UNCOLLECTED_FACTOR` in gateway/records/adapters/limits.py).
    """


# Columns that `read_limits` reads.
LIMIT_COLUMNS = ("limits", *FORMER_COLUMNS)
# Limits of a new tenant, unless the operator sets others.
DEFAULT_LIMITS = Limits(**{kind.name: kind.default for kind in REQUEST_KINDS})


def read_limits(row: Row[Any], prefix: str = "") -> Limits:
    """Return the limits of a row. prefix: the prefix of their columns' names."""
    return msgspec.convert(_stored(row, prefix), Limits)


def read_soft_budgets(row: Row[Any]) -> SoftBudgets:
    """Return the soft budgets of a tenant's row."""
    return msgspec.convert(_stored(row, ""), SoftBudgets)


def write_limits(limits: Limits) -> dict[str, Any]:
    """Return the column values of limits."""
    return _columns({name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None})


def change_limits(row: Row[Any] | None, changes: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the column values of a row's limits after changes. Kinds of a newer release stay as they are.

    row: None for a new row.
    """
    stored = {} if row is None else _stored(row)
    return _columns({name: value for name, value in {**stored, **changes}.items() if value is not None})


def read_adapter_limits(stored: str | None) -> AdapterLimits:
    """Return the limits of a tenant's row; NULL, in a row of the previous release, means the defaults."""
    return AdapterLimits() if stored is None else msgspec.json.decode(stored, type=AdapterLimits)


def write_adapter_limits(limits: AdapterLimits) -> str:
    return msgspec.json.encode(limits).decode()


def limit_value(name: str) -> ColumnElement[Any]:
    """Return the value of a tenant's limit in a query; NULL: not limited."""
    if name in FORMER_COLUMNS:
        return tenants.c[name]
    return _JsonNumber(tenants.c.limits, literal(name))


class _JsonNumber(FunctionElement[int]):
    """Number of a field of a JSON object that is stored as text."""

    type = BigInteger()
    inherit_cache = True


@compiles(_JsonNumber, "sqlite")
def _on_sqlite(element: _JsonNumber, compiler: SQLCompiler, **options: Any) -> str:
    column, name = (compiler.process(each, **options) for each in element.clauses)
    return f"json_extract({column}, '$.' || {name})"


@compiles(_JsonNumber, "postgresql")
def _on_postgresql(element: _JsonNumber, compiler: SQLCompiler, **options: Any) -> str:
    column, name = (compiler.process(each, **options) for each in element.clauses)
    return f"CAST(CAST({column} AS JSON) ->> {name} AS BIGINT)"


def _stored(row: Row[Any], prefix: str = "") -> dict[str, int | None]:
    # The column is NULL if a gateway of the previous release has added the row.
    stored = getattr(row, f"{prefix}limits")
    values: dict[str, int | None] = {} if stored is None else msgspec.json.decode(stored)
    return {**values, **{name: getattr(row, prefix + name) for name in FORMER_COLUMNS}}


def _columns(values: Mapping[str, int | None]) -> dict[str, Any]:
    return {"limits": msgspec.json.encode(values).decode(), **{name: values.get(name) for name in FORMER_COLUMNS}}
