"""Queries of the adapters' use, for the list of adapters: recent requests, last use, and adapters without use."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, FromClause, Subquery, and_, case, func, literal, select, tuple_, union_all
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.activity.tables import ACTIVITY, MODEL, activity_series
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import adapters, tenants, usage_daily, usage_hourly

# Period of `requests`, and period in which the last use is looked for. An adapter without a use in it counts as unused.
RECENT, KNOWN = timedelta(hours=24), timedelta(days=30)
# Period whose used adapters are looked for first, in the order of the last use.
LATELY = timedelta(hours=2)
# CANDIDATES: number of series whose hours are read for the adapters with the most requests, as a multiple of the
# adapters up to the end of the page. By Zipf's law the bounds, up to twice the values, need about twice as many.
# MAX_BUSIEST: end of the last page that is found so; beyond it, all hours are read in about the same time.
CANDIDATES, MAX_BUSIEST = 4, 150


class Use(NamedTuple):
    """Use of an adapter: its requests within RECENT, and the start of the hour or day of its last one within KNOWN."""

    requests: int = 0
    last_used: datetime | None = None


async def most_used(
    connection: AsyncConnection, number: ColumnElement[int], sort: str, window: tuple[int, int], now: datetime
) -> Sequence[Row[Any]]:
    """Return the ids in a window of all adapters, each with their number, the most or the last used first.

    window: offset and limit. Returns nothing if it has adapters that were not used in RECENT. The used ones are found
    by the sums of hours, so that the others are not looked at. Those used LATELY come before all others.
    """
    table, (offset, limit) = ACTIVITY[3600], window
    is_near = sort == "requests" and offset + limit <= MAX_BUSIEST
    if is_near and (busiest := await _busiest(connection, number, window, now)):
        return busiest
    use = func.sum(table.c.requests) if sort == "requests" else func.max(table.c.start)
    for period in (RECENT,) if sort == "requests" else (LATELY, RECENT):
        which = (table.c.kind == MODEL, table.c.start > int((now - period).timestamp()))
        used = select(table.c.series_id, use.label("value")).where(*which).group_by(table.c.series_id).subquery()
        chosen = select(adapters.c.id, number).select_from(_owned(used))
        chosen = chosen.order_by(used.c.value.desc(), adapters.c.name, tenants.c.name).limit(limit).offset(offset)
        found = (await connection.execute(chosen)).all()
        if len(found) == limit:
            return found
    return []


async def _busiest(
    connection: AsyncConnection, number: ColumnElement[int], window: tuple[int, int], now: datetime
) -> Sequence[Row[Any]]:
    """Return the ids in a window of all adapters by their requests within RECENT, each with their number.

    Returns nothing if the window may have others than those found. A series has at most as many requests within RECENT
    as in the days that RECENT touches. So the hours are read only of the series with the most requests in these days,
    and they suffice if no other can come before the window's last one.
    """
    days, (offset, limit) = ACTIVITY[86400], window
    candidates = CANDIDATES * (offset + limit)
    first_day = (now - RECENT).replace(hour=0, minute=0, second=0, microsecond=0)
    most = func.sum(days.c.requests).label("most")
    bounds = select(days.c.series_id, most).where(days.c.kind == MODEL, days.c.start >= int(first_day.timestamp()))
    bounds = bounds.group_by(days.c.series_id).order_by(most.desc()).limit(candidates)
    largest = bounds.cte("largest")
    # A single statement reads both, so that bounds and values belong together. With fewer candidates than asked for,
    # the bound is 0.
    least = case((func.count() < candidates, 0), else_=func.min(largest.c.most))
    bound = select(least).select_from(largest).scalar_subquery()
    value = recent_requests(now)
    chosen = select(adapters.c.id, value.label("value"), bound, number).select_from(_owned(largest))
    chosen = chosen.order_by(value.desc().nullslast(), adapters.c.name, tenants.c.name).limit(limit).offset(offset)
    found = (await connection.execute(chosen)).all()
    return found if len(found) == limit and (found[-1][1] or 0) > found[-1][2] else []


def _owned(series: FromClause) -> FromClause:
    """Return the rows of some series joined with their names, adapters and tenants. Deleted adapters are left out."""
    names = activity_series.c
    same = and_(adapters.c.tenant_id == names.tenant_id, adapters.c.name == names.name)
    source = series.join(activity_series, names.id == series.c.series_id).join(adapters, same)
    return source.join(tenants, tenants.c.id == adapters.c.tenant_id)


def last_use(now: datetime) -> ColumnElement[Any]:
    """Return the start of the hour within RECENT, or else of the day within KNOWN, of the series' last request."""
    return func.coalesce(last(now, 3600, RECENT), last(now, 86400, KNOWN))


def last(now: datetime, level: int, since: timedelta) -> ColumnElement[Any]:
    """Return the start of the last hour or day (3600 or 86400) with a request of the series, within `since` of now."""
    table = ACTIVITY[level]
    which = (table.c.series_id == activity_series.c.id, table.c.start > int((now - since).timestamp()))
    return select(func.max(table.c.start)).where(*which).correlate(activity_series).scalar_subquery()


def unused(now: datetime, days: int) -> list[ColumnElement[bool]]:
    """Return the conditions of adapters as old as `days` whose series has no request since then.

    The sums of days include the last hours, so they have every use. The day in which the period begins counts.
    """
    day = timedelta(days=1)
    return [adapters.c.created_at <= now - days * day, last(now, 86400, (days + 1) * day).is_(None)]


def recent_requests(now: datetime) -> ColumnElement[Any]:
    """Return the series' requests within RECENT."""
    table = ACTIVITY[3600]
    which = (table.c.series_id == activity_series.c.id, table.c.start > int((now - RECENT).timestamp()))
    return select(func.sum(table.c.requests)).where(*which).correlate(activity_series).scalar_subquery()


async def uses_of_series(
    connection: AsyncConnection, now: datetime, rows: Sequence[Row[Any]]
) -> dict[tuple[str, str], Use]:
    """Return the uses of these adapters by tenant and name, from the sums for charts.

    Each adapter costs two or three reads of an index. PostgreSQL may plan a single query of the sums for reports so
    that it reads those of all tenants.
    """
    series = activity_series.c
    found = select(series.tenant_id, series.name, recent_requests(now), last_use(now)).where(series.kind == MODEL)
    found = found.where(tuple_(series.tenant_id, series.name).in_([(row.tenant_id, row.name) for row in rows]))
    return {
        (tenant_id, name): Use(int(requests or 0), None if last is None else datetime.fromtimestamp(last, UTC))
        for tenant_id, name, requests, last in await connection.execute(found)
    }


def uses_of(
    now: datetime, tenant_id: str | None, rows: Sequence[Row[Any]] | None = None, *, only_recent: bool = False
) -> Subquery:
    """Return the requests within RECENT and the last use within KNOWN, by tenant and model.

    tenant_id: only of this tenant. rows: only of these adapters. only_recent: leave out uses before RECENT.
    """
    parts = []
    for table, at, since in (
        (usage_hourly, usage_hourly.c["hour"], RECENT),
        (usage_daily, usage_daily.c["day"], KNOWN),
    ):
        if only_recent and table is usage_daily:
            continue
        requests: ColumnElement[int] = table.c.requests if table is usage_hourly else literal(0)
        part = select(table.c.tenant_id, table.c.model, requests.label("requests"), at.label("at"))
        part = part.where(at > now - since)
        if tenant_id is not None:
            part = part.where(table.c.tenant_id == tenant_id)
        if rows is not None:
            part = part.where(table.c.tenant_id.in_(sorted({row.tenant_id for row in rows})))
            part = part.where(table.c.model.in_(sorted({row.name for row in rows})))
        parts.append(part)
    every = union_all(*parts).subquery()
    sums = int_sum(every.c.requests).label("requests"), func.max(every.c.at).label("last_used")
    return select(every.c.tenant_id, every.c.model, *sums).group_by(every.c.tenant_id, every.c.model).subquery()


def used_in(now: datetime, days: int, tenant_id: str | None) -> Subquery:
    """Return the tenant and name of each model with a request in the last days, and in the day in which they begin."""
    own = usage_daily.c
    which = [own.day > now - timedelta(days=days + 1)] + ([own.tenant_id == tenant_id] if tenant_id is not None else [])
    return select(own.tenant_id, own.model).where(*which).distinct().subquery()
