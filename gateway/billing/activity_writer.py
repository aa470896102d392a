"""Writer of the sums for charts (gateway/records/activity/tables.py), in the transaction of their usage rows."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from operator import add

import msgspec
from sqlalchemy import Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.activity.tables import (
    ACTIVITY,
    BASE,
    BOUNDS,
    ENGINE,
    LATENCY,
    LATENCY_MAX,
    MAXIMA,
    MODEL,
    OWN_BASE,
    STATUSES,
    SUMMED,
    TENANT,
    TTFT,
    TTFT_MAX,
    activity_series,
)
from gateway.usage_row import UsageRow

# Common name of a tenant's mixtures, because a tenant can make any number of them. No adapter can have this name.
MIXTURES = "(mixtures)"
# Maximum number of series that this process remembers to be in the database.
MAX_KNOWN = 50_000

# Kinds whose sums belong to no tenant.
SHARED = (ENGINE, BASE)

COLUMNS = (*SUMMED, *LATENCY, *TTFT, *MAXIMA)
# Columns before this one are summed; the maxima follow.
_NUM_SUMMED = len(COLUMNS) - len(MAXIMA)
_AT = {name: index for index, name in enumerate(COLUMNS)}
_OF_STATUS = {status: _AT[status] for status in STATUSES}
_TOKENS = tuple((_AT[name], name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost"))
_FIRST_LATENCY, _FIRST_TTFT = _AT[LATENCY[0]], _AT[TTFT[0]]


class Series(msgspec.Struct, frozen=True):
    """A row of `activity_series`."""

    id: int
    kind: int
    tenant_id: str
    tenant: str
    name: str


Sums = dict[tuple[int, int, int], list[int]]
"""Sums by kind, start and id of the series, in the order of COLUMNS."""


class ActivityWriter:
    """Adds usage rows to the sums. dialect: "sqlite" or "postgresql"."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect
        self._known: set[int] = set()
        adding = _adding_on_postgresql if dialect == "postgresql" else _adding_on_sqlite
        self._statements = {level: adding(table) for level, table in ACTIVITY.items()}

    def forget(self) -> None:
        """Forget which series the database has, after a transaction that failed."""
        self._known.clear()

    async def add(self, connection: AsyncConnection, rows: Iterable[UsageRow]) -> None:
        """Add rows that are new.

        All writers lock the sums in the same order: by level, kind, start and series, the tenants' own sums first. The
        sums of engines and base models belong to the rows of every writer, so they are locked last and briefly.
        """
        sums: Sums = {}
        series: dict[int, Series] = {}
        for row in rows:
            add_row(sums, series, row)
        if new := [each for series_id, each in sorted(series.items()) if series_id not in self._known]:
            await self._insert_series(connection, new)
        await self._add(connection, {key: values for key, values in sums.items() if key[0] not in SHARED})
        await self._add(connection, {key: values for key, values in sums.items() if key[0] in SHARED})

    async def _add(self, connection: AsyncConnection, sums: Sums) -> None:
        for level, statement in self._statements.items():
            if level > 60:
                sums = coarser(sums, level)
            if self._dialect == "postgresql":
                await connection.execute(text(statement), {"rows": _as_json(sums)})
            else:
                await connection.exec_driver_sql(statement, [(*key, *values) for key, values in sorted(sums.items())])

    async def _insert_series(self, connection: AsyncConnection, new: Sequence[Series]) -> None:
        if len(self._known) + len(new) > MAX_KNOWN:
            self._known.clear()
        insert = (postgresql if self._dialect == "postgresql" else sqlite).insert(activity_series)
        await connection.execute(insert.on_conflict_do_nothing(), [msgspec.structs.asdict(each) for each in new])
        self._known.update(each.id for each in new)


def add_row(sums: Sums, series: dict[int, Series], row: UsageRow) -> None:
    """Add a row to the sums of its minute, in its tenant's, its model's and its engine's series."""
    start = int(row.created_at.timestamp()) // 60 * 60
    found = series_of(row.tenant_id, row.tenant, row.model, row.engine, is_base=row.adapter_digest is None)
    changes = [
        (0, 1),
        (_OF_STATUS.get(row.status, _AT["error"]), 1),
        *((index, getattr(row, name)) for index, name in _TOKENS),
        (_AT["queue_ms"], row.queue_ms or 0),
        (_AT["latency_ms"], row.latency_ms),
        (_FIRST_LATENCY + bisect_left(BOUNDS, row.latency_ms), 1),
    ]
    if row.ttft_ms is not None:
        changes += [(_AT["ttft_ms"], row.ttft_ms), (_FIRST_TTFT + bisect_left(BOUNDS, row.ttft_ms), 1)]
    maxima = ((_AT[LATENCY_MAX], row.latency_ms), (_AT[TTFT_MAX], row.ttft_ms or 0))
    for each in found:
        series[each.id] = each
        key = each.kind, start, each.id
        values = sums.get(key)
        if values is None:
            values = sums[key] = [0] * len(COLUMNS)
        for index, amount in changes:
            values[index] += amount
        for index, value in maxima:
            values[index] = max(values[index], value)


def series_of(tenant_id: str, tenant: str, model: str, engine: str | None, *, is_base: bool) -> list[Series]:
    """Return the series of a request. is_base: whether it used no adapter."""
    found = [_series(TENANT, tenant_id, tenant, ""), _series(ENGINE, "", "", engine or "")]
    if "*" in model:
        return [*found, _series(MODEL, tenant_id, tenant, MIXTURES)]
    if not is_base:
        return [*found, _series(MODEL, tenant_id, tenant, model)]
    return [*found, _series(OWN_BASE, tenant_id, tenant, model), _series(BASE, "", "", model)]


@lru_cache(MAX_KNOWN)
def _series(kind: int, tenant_id: str, tenant: str, name: str) -> Series:
    hashed = blake2b("\0".join((f"{kind}", tenant_id, name)).encode(), digest_size=8).digest()
    return Series(int.from_bytes(hashed) >> 1, kind, tenant_id, tenant, name)


def coarser(sums: Sums, level: int) -> Sums:
    """Return the sums of longer periods."""
    found: Sums = {}
    for (kind, start, series_id), values in sums.items():
        key = kind, start // level * level, series_id
        found[key] = _joined(found[key], values) if key in found else values
    return found


def _joined(one: list[int], other: list[int]) -> list[int]:
    summed = map(add, one[:_NUM_SUMMED], other[:_NUM_SUMMED])
    return [*summed, *map(max, one[_NUM_SUMMED:], other[_NUM_SUMMED:])]


def _as_json(sums: Sums) -> str:
    """Return the sums as JSON objects without zeros, which the statement fills in again."""
    rows = []
    for (kind, start, series_id), values in sums.items():
        found = {name: value for name, value in zip(COLUMNS, values, strict=True) if value}
        rows.append({"kind": kind, "start": start, "series_id": series_id, **found})
    return msgspec.json.encode(rows).decode()


def _adding_on_postgresql(table: Table) -> str:
    dialect = postgresql.dialect()
    columns = ", ".join(f"{column.name} {column.type.compile(dialect)}" for column in table.c)
    names = ", ".join(column.name for column in table.c)
    values = ", ".join(f"COALESCE({name}, 0)" if name in SUMMED else name for name in table.c.keys())  # noqa: SIM118
    return (
        f"INSERT INTO {table.name} ({names}) SELECT {values} FROM jsonb_to_recordset(CAST(:rows AS jsonb)) "
        f"AS row({columns}) ORDER BY kind, start, series_id {_merging(table, 'GREATEST')}"
    )


def _adding_on_sqlite(table: Table) -> str:
    names = [*table.primary_key.columns.keys(), *COLUMNS]
    values = ", ".join("?" if name not in (*LATENCY, *TTFT, *MAXIMA) else "NULLIF(?, 0)" for name in names)
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({values}) {_merging(table, 'MAX')}"


def _merging(table: Table, larger: str) -> str:
    """Return the clause that adds to an existing row. A bucket that stays empty stays NULL.

    larger: the dialect's function for the larger of two values.
    """
    changes = []
    for name in COLUMNS:
        own, more = f"{table.name}.{name}", f"excluded.{name}"
        both = f"{larger}({own}, {more})" if name in MAXIMA else f"{own} + {more}"
        changes.append(f"{name} = {both if name in SUMMED else f'COALESCE({both}, {own}, {more})'}")
    return f"ON CONFLICT (kind, start, series_id) DO UPDATE SET {', '.join(changes)}"
