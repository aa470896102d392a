"""Sums of each tenant's usage in the present month, in the periods of budgets, and in the days of the forecast."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, FromClause, Subquery, and_, case, func, select

from gateway.limits.kinds import BUDGET
from gateway.limits.periods import period_start
from gateway.records.activity.tables import ACTIVITY, TENANT, activity_series
from gateway.records.sql.sums import int_sum
from gateway.records.usage.rows import UsageFilter, rows_of
from gateway.records.usage.tenant_sums import series_of

# Number of past days whose mean spend is expected for each remaining day of the month.
FORECAST_DAYS = 7
DAY = timedelta(days=1)
# Column of the sums, the start and the end of its days; None: no end. The periods of budgets are whole days.
Values = Mapping[str, tuple[str, datetime, datetime | None]]


def periods(now: datetime) -> tuple[datetime, datetime, datetime]:
    """Return the starts of this month, of the days of the forecast, and of today."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return today.replace(day=1), today - FORECAST_DAYS * DAY, today


def month_sums(now: datetime, ids: Sequence[str] | None, dialect: str, *, by_tenant: bool) -> Subquery:
    """Select the sums of each tenant: `spent_` and the kind of each budget, spend, requests, recent and today.

    ids: only these tenants; None: all. by_tenant: whether the sums by tenant are complete.
    """
    month, recent, today = periods(now)
    budgets = {f"spent_{kind}": ("cost", period_start(kind, now), None) for kind in sorted(BUDGET)}
    values: Values = {
        **budgets,
        "spend": ("cost", month, None),
        "requests": ("requests", month, None),
        "recent": ("cost", recent, today),
        "today": ("cost", today, None),
    }
    since = min(start for _, start, _ in values.values())
    if by_tenant:
        return _by_series(values, since, ids, dialect)
    rows = rows_of(dialect, ("day",), UsageFilter(tenant_ids=ids), since, None)
    assert rows is not None
    sums = [int_sum(value).label(name) for name, value in _parts(rows, rows.c.day, values).items()]
    return select(rows.c.tenant_id, *sums).group_by(rows.c.tenant_id).subquery("sums")


def _by_series(values: Values, since: datetime, ids: Sequence[str] | None, dialect: str) -> Subquery:
    """Select the sums from those for charts, which are grouped before they are joined with the tenants' ids."""
    table, names = ACTIVITY[86400], activity_series.c
    seconds: Any = {
        name: (column, int(start.timestamp()), None if end is None else int(end.timestamp()))
        for name, (column, start, end) in values.items()
    }
    owners = UsageFilter(tenant_ids=ids).owners()
    criteria = series_of([TENANT], owners, None, table, dialect)
    parts = [func.sum(value).label(name) for name, value in _parts(table, table.c.start, seconds).items()]
    query = select(table.c.series_id, *parts).where(criteria, table.c.start >= int(since.timestamp()))
    rows = query.group_by(table.c.series_id).subquery()
    # A tenant has a single series. Grouped by the tenant, SQLite expects enough rows to build an index for a join.
    sums = [int_sum(rows.c[name]).label(name) for name in values]
    found = select(names.tenant_id, *sums).join_from(rows, activity_series, names.id == rows.c.series_id)
    return found.group_by(names.tenant_id).subquery("sums")


def _parts(rows: FromClause, day: ColumnElement[Any], values: Any) -> dict[str, ColumnElement[int]]:
    """Return the values of a row or 0 outside of their days."""
    found: dict[str, ColumnElement[int]] = {}
    for name, (column, start, end) in values.items():
        within = [day >= start, *([] if end is None else [day < end])]
        found[name] = case((and_(*within), rows.c[column]), else_=0)
    return found
