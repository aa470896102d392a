"""Usage of a period as a ranking of groups, with their curves: a page of the groups in any order, in bounded memory."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Subquery, case, cast, false, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.database import Database
from gateway.records.money.usage_report import SUMMED, UsageFilter, rows_of
from gateway.records.sums import int_sum
from gateway.records.tables import api_keys

GroupBy = Literal["tenant", "model", "key", "end_user", "hour", "day", "month"]
Measure = Literal["cost", "tokens", "requests"]
Step = Literal["hour", "day", "month"]
GROUPS: tuple[GroupBy, ...] = ("tenant", "model", "key", "end_user", "hour", "day", "month")
MEASURES: tuple[Measure, ...] = ("cost", "tokens", "requests")
# Columns that identify a group.
KEYS: dict[GroupBy, tuple[str, ...]] = {
    "tenant": ("tenant_id", "tenant"),
    "model": ("tenant_id", "tenant", "model"),
    "key": ("tenant_id", "tenant", "key_id"),
    "end_user": ("tenant_id", "tenant", "end_user"),
    "hour": ("hour",),
    "day": ("day",),
    "month": ("month",),
}
# Number of groups with a curve of their own.
CURVES = 8


class RankedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of a group; fields that it does not have are None. start: of the hour, day or month. key: the key's label.

    end_user: "" for requests without one. before: the measure in the period before, None for a group of times. cost:
    micro-units.
    """

    tenant_id: str | None = None
    tenant: str | None = None
    model: str | None = None
    key_id: str | None = None
    key: str | None = None
    end_user: str | None = None
    start: datetime | None = None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: int
    before: int | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def name(self) -> str:
        """Return the group's name without its tenant's."""
        if self.end_user is not None:
            return self.end_user or "none given"
        return self.key or self.key_id or self.model or self.tenant or ""


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """A page of groups, the number of all groups, and the sums over all of them by SUMMED."""

    groups: list[RankedGroup]
    number: int
    total: dict[str, int]


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a measure by step: of the greatest groups, and of all groups together. starts: those with any usage."""

    starts: list[datetime]
    groups: list[tuple[RankedGroup, list[int]]]
    total: list[int]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Usage that a ranking is about."""

    which: UsageFilter
    since: datetime
    until: datetime


class UsageRanking:
    """Queries of rankings. They raise Unavailable, and BadRequest as a report by end user does."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def groups(
        self,
        part: Part,
        group_by: GroupBy,
        order: str,
        *,
        descending: bool = True,
        offset: int = 0,
        limit: int = 50,
    ) -> Ranking:
        """Return a page of groups. order: of SUMMED, "tokens" or "name"."""
        rows = rows_of(self._database.dialect, (group_by,), part.which, part.since, part.until)
        if rows is None:
            return Ranking(groups=[], number=0, total=dict.fromkeys(SUMMED, 0))
        keys = [rows.c[name] for name in KEYS[group_by]]
        grouped = select(*keys, *_sums(rows)).group_by(*keys).cte("grouped")
        totals = [cast(func.sum(grouped.c[name]).over(), BigInteger).label(f"all_{name}") for name in SUMMED]
        query = select(grouped, func.count().over().label("number"), *totals).offset(offset).limit(limit)
        ordered = [_order(grouped, group_by, order)] if order != "name" else []
        names = [grouped.c[name] for name in KEYS[group_by][1:] or KEYS[group_by]]
        first = [column.desc() if descending else column for column in ordered or names]
        query = query.order_by(*first, *(grouped.c[name] for name in KEYS[group_by]))
        async with self._database.read() as connection:
            found = (await connection.execute(query)).all()
            labels = await _labels(connection, [row.key_id for row in found]) if group_by == "key" else {}
        if not found:
            return Ranking(groups=[], number=0, total=dict.fromkeys(SUMMED, 0))
        total = {name: getattr(found[0], f"all_{name}") for name in SUMMED}
        groups = [_group(row._mapping, group_by, labels) for row in found]
        return Ranking(groups=groups, number=found[0].number, total=total)

    async def earlier(
        self, part: Part, group_by: GroupBy, groups: Sequence[RankedGroup], measure: Measure
    ) -> list[RankedGroup]:
        """Return the groups with their measure in `part`, the period before."""
        if "tenant" not in KEYS[group_by] or not groups:
            return list(groups)
        rows = rows_of(self._database.dialect, (group_by,), part.which, part.since, part.until)
        if rows is None:
            return list(groups)
        keys = [rows.c[name] for name in KEYS[group_by]]
        own = [_identity(group, group_by) for group in groups]
        query = select(*keys, _measured(rows, measure)).where(tuple_(*keys).in_(own)).group_by(*keys)
        async with self._database.read() as connection:
            found = {tuple(row[:-1]): row[-1] for row in await connection.execute(query)}
        return [
            msgspec.structs.replace(group, before=found.get(identity, 0))
            for group, identity in zip(groups, own, strict=True)
        ]

    async def total(self, part: Part) -> dict[str, int]:
        """Return the sums over all groups."""
        rows = rows_of(self._database.dialect, (), part.which, part.since, part.until)
        if rows is None:
            return dict.fromkeys(SUMMED, 0)
        async with self._database.read() as connection:
            found = (await connection.execute(select(*_sums(rows)))).one()
        return dict(found._mapping)

    async def curves(
        self, part: Part, group_by: GroupBy, groups: Sequence[RankedGroup], measure: Measure, step: Step
    ) -> Curves:
        """Return the curves of these groups and of all groups together."""
        by_time = "tenant" not in KEYS[group_by]
        wanted = (step,) if by_time else (group_by, step)
        rows = rows_of(self._database.dialect, wanted, part.which, part.since, part.until)
        if rows is None:
            return Curves(starts=[], groups=[], total=[])
        at = rows.c[step]
        async with self._database.read() as connection:
            keys = [] if by_time else [rows.c[name] for name in KEYS[group_by]]
            own = [] if by_time else [_identity(group, group_by) for group in groups]
            # The others together have NULL for a key, so that one pass over the rows finds all curves.
            is_own = tuple_(*keys).in_(own) if keys and own else false()
            shown = [case((is_own, key), else_=None).label(key.name) for key in keys]
            query = select(*shown, at, _measured(rows, measure)).group_by(*shown, at)
            total: dict[datetime, int] = {}
            found: dict[tuple[Any, ...], dict[datetime, int]] = {}
            for row in await connection.execute(query):
                found.setdefault(tuple(row[:-2]), {})[row[-2]] = row[-1]
                total[row[-2]] = total.get(row[-2], 0) + row[-1]
            total = dict(sorted(total.items()))
        curves = []
        for group in () if by_time else groups:
            values = found.get(_identity(group, group_by), {})
            curves.append((group, [values.get(start, 0) for start in total]))
        return Curves(starts=list(total), groups=curves, total=list(total.values()))


def _sums(rows: Subquery) -> list[ColumnElement[int]]:
    return [int_sum(rows.c[name]).label(name) for name in SUMMED]


def _measured(rows: Subquery, measure: Measure) -> ColumnElement[int]:
    value = rows.c.prompt_tokens + rows.c.completion_tokens if measure == "tokens" else rows.c[measure]
    return int_sum(value)


def _order(grouped: Any, group_by: GroupBy, order: str) -> ColumnElement[Any]:
    if order == "tokens":
        tokens: ColumnElement[Any] = grouped.c.prompt_tokens + grouped.c.completion_tokens
        return tokens
    column: ColumnElement[Any] = grouped.c[order]
    return column


def _identity(group: RankedGroup, group_by: GroupBy) -> tuple[Any, ...]:
    return tuple(getattr(group, name) for name in KEYS[group_by])


def _group(row: Any, group_by: GroupBy, labels: dict[str, str]) -> RankedGroup:
    values = {name: row[name] for name in (*KEYS[group_by], *SUMMED)}
    if "tenant" not in values:
        values["start"] = values.pop(group_by)
    return RankedGroup(**values, key=labels.get(values.get("key_id", "")))


async def _labels(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, str]:
    query = select(api_keys.c.id, api_keys.c.label).where(api_keys.c.id.in_(sorted(set(ids))))
    return {row.id: row.label for row in await connection.execute(query)}
