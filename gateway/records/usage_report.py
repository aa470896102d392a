"""Reads of what the ledger wrote: sums over any time, from the days' and hours' sums where whole ones lie within."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, Table, func, literal, select, union_all

from gateway.records.database import Database
from gateway.records.tables import UtcDateTime, api_keys, tenants, usage, usage_daily, usage_hourly
from gateway.records.usage import UsageRow

SUMMED = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "cost")
# Rows are of one tenant in any case.
GROUPS = ("tenant", "model", "key", "day")
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
# When a row, an hour or a day begins.
TIMES = {usage: usage.c.created_at, usage_hourly: usage_hourly.c["hour"], usage_daily: usage_daily.c["day"]}

Moment = datetime | None
"""An end of a time; None is open."""


class UsageSums(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one tenant and whatever was asked to be told apart; the rest is left out of JSON.

    key: the label of the key `key_id`, if it is still there. day: its start, UTC. cost: micro-units.
    deleted: the tenant is no more.
    """

    tenant: str
    model: str | None = None
    key_id: str | None = None
    key: str | None = None
    day: datetime | None = None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: int
    deleted: bool = False


class UsageReport:
    """Raises Unavailable when the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def sums(
        self,
        group_by: Sequence[str] = ("model",),
        *,
        tenant_id: str | None = None,
        tenant: str | None = None,
        since: Moment = None,
        until: Moment = None,
    ) -> list[UsageSums]:
        """Of the requests that arrived in `[since, until)`, for each tenant and each of what `group_by` names (GROUPS).

        tenant: by name instead of by id, which also finds what deleted tenants of that name have used.
        """
        parts = []
        for table, start, end in segments(since, until):
            part = _part(table, start, end)
            if tenant is not None:
                part = part.where(table.c.tenant == tenant)
            if tenant_id is not None:
                part = part.where(table.c.tenant_id == tenant_id)
            parts.append(part)
        if not parts:
            return []
        # One statement, so that a row that is being written is seen in the row and in the sums, or in neither.
        every = union_all(*parts).subquery()
        keys: list[ColumnElement[Any]] = [every.c.tenant, tenants.c.id.is_(None).label("deleted")]
        source = every.outerjoin(tenants, tenants.c.id == every.c.tenant_id)
        if "day" in group_by:
            keys.append(every.c.day)
        if "model" in group_by:
            keys.append(every.c.model)
        if "key" in group_by:
            source = source.outerjoin(api_keys, api_keys.c.id == every.c.key_id)
            keys += [every.c.key_id, api_keys.c.label.label("key")]
        query = select(*keys, *(func.sum(every.c[name]).label(name) for name in SUMMED)).select_from(source)
        # By tenant, then as the groups are listed; "deleted" last, for a name may have had two lives.
        order = [keys[0], *keys[2:], keys[1]]
        async with self._database.read() as connection:
            rows = (await connection.execute(query.group_by(*keys).order_by(*order))).all()
        # PostgreSQL sums bigints to a Decimal.
        return [UsageSums(**{**row._mapping, **{name: int(row._mapping[name]) for name in SUMMED}}) for row in rows]

    async def knows(self, tenant: str) -> bool:
        """Whether a tenant of this name, deleted or not, has used anything."""
        async with self._database.read() as connection:
            query = select(usage_daily.c.tenant).where(usage_daily.c.tenant == tenant).limit(1)
            return (await connection.execute(query)).first() is not None

    async def recent(self, tenant_id: str | None = None, limit: int = 50) -> list[UsageRow]:
        """The newest rows first."""
        query = select(usage).order_by(usage.c.created_at.desc(), usage.c.request_id).limit(limit)
        if tenant_id is not None:
            query = query.where(usage.c.tenant_id == tenant_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [UsageRow(**row._mapping) for row in rows]


def segments(since: Moment, until: Moment) -> Iterator[tuple[Table, Moment, Moment]]:
    """`[since, until)` cut where it is cheapest: whole days, whole hours before and after them, rows at the edges.

    Every segment of hours lies within one day, every one of rows within one hour.
    """
    first_hour = None if since is None else _start(since, HOUR, up=True)
    last_hour = None if until is None else _start(until, HOUR)
    if first_hour is not None and last_hour is not None and first_hour > last_hour:
        yield from _unless_empty(usage, since, until)
        return
    yield from _unless_empty(usage, since, first_hour)
    yield from _unless_empty(usage, last_hour, until)
    first_day = None if first_hour is None else _start(first_hour, DAY, up=True)
    last_day = None if last_hour is None else _start(last_hour, DAY)
    if first_day is not None and last_day is not None and first_day > last_day:
        yield from _unless_empty(usage_hourly, first_hour, last_hour)
        return
    yield from _unless_empty(usage_hourly, first_hour, first_day)
    yield from _unless_empty(usage_hourly, last_day, last_hour)
    if first_day is None or last_day is None or first_day < last_day:
        yield usage_daily, first_day, last_day


def _unless_empty(table: Table, start: Moment, end: Moment) -> Iterator[tuple[Table, Moment, Moment]]:
    """Rows or hours; an open end has none, for days reach that far."""
    if start is not None and end is not None and start < end:
        yield table, start, end


def _start(moment: datetime, period: timedelta, *, up: bool = False) -> datetime:
    """The start of the hour or day that holds the moment; with `up` of the next one unless the moment is a start."""
    moment = moment.astimezone(UTC)
    start = moment.replace(minute=0, second=0, microsecond=0)
    if period == DAY:
        start = start.replace(hour=0)
    return start + period if up and start < moment else start


def _part(table: Table, start: Moment, end: Moment) -> Select[Any]:
    """Rows and sums alike, as columns of the same names."""
    at: ColumnElement[datetime] = TIMES[table]
    day: ColumnElement[Any] = at
    if start is not None and table is not usage_daily:
        day = literal(_start(start, DAY), UtcDateTime)
    requests = literal(1) if table is usage else table.c.requests
    columns = (table.c.tenant_id, table.c.tenant, table.c.model, table.c.key_id, day.label("day"))
    sums = (requests.label("requests"), *(table.c[name] for name in SUMMED[1:]))
    query = select(*columns, *sums)
    if start is not None:
        query = query.where(at >= start)
    if end is not None:
        query = query.where(at < end)
    return query
