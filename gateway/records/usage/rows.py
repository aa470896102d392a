"""Rows and sums of usage that make up a period: daily and hourly sums wherever these fit, rows at its edges."""

from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, Subquery, Table, func, literal, select, tuple_, union_all

from gateway.errors import BadRequest
from gateway.records.activity.tables import activity_series
from gateway.records.sql.tables import UtcDateTime, usage, usage_daily, usage_hourly
from gateway.records.usage.end_user_tables import usage_end_users
from gateway.records.usage.tenant_sums import PERIODS, STARTS, SUMMED, can_sum, sums_part

# Groups of which the usual sums know nothing. A report by version reads the rows of requests; one by end user has sums
# of whole days, but only together with the other groups of BY_END_USER and without a filter by key or model.
BY_ROWS = frozenset({"version", "end_user"})
BY_END_USER = frozenset({"tenant", "end_user", "day", "month"})
# Longest period of a report by such a group, in days.
MOST_VERSION_DAYS = 31
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
# The column with the start of a row, an hour or a day.
TIMES = {usage: usage.c.created_at, usage_hourly: usage_hourly.c["hour"], usage_daily: usage_daily.c["day"]}

Moment = datetime | None
"""Start or end of a period; None: the period has no such bound."""


def rows_of(
    dialect: str,
    group_by: Sequence[str],
    criteria: "UsageFilter",
    since: Moment,
    until: Moment,
    *,
    by_tenant: bool = False,
    summed: Collection[datetime] = (),
    measures: Sequence[str] = SUMMED,
) -> Subquery | None:
    """Return the rows and sums that make up `[since, until)`; None for an empty period.

    Columns: those of UsageFilter, SUMMED or at least `measures`, and those that the grouping needs. by_tenant: whether
    the sums by tenant are complete and may replace those by key and model. summed: days whose sums by end user are
    complete; for a report that `can_sum_end_users` allows. Raises BadRequest for a period that is too long for a report
    that reads the rows of requests.
    """
    if BY_ROWS & set(group_by):
        covered = _row_segments(since, until, summed)
    else:
        covered = segments(since, until, days="hour" not in group_by)
    by_tenant = by_tenant and can_sum(group_by, criteria.models, criteria.key_id)
    parts = []
    for table, start, end in covered:
        if by_tenant and table is not usage:
            level = 3600 if table is usage_hourly else 86400
            which_sums: Any = {"owners": criteria.owners(), "models": criteria.models, "measures": measures}
            parts.append(sums_part(level, (start, end), group_by, dialect, **which_sums))
        else:
            parts.append(criteria.narrow(_select_span(table, start, end, group_by, dialect)))
            if by_tenant or summed:
                parts[-1] = _columns_of_sums(parts[-1], group_by, measures)
    if days := whole_days(since, until, summed):
        of_days = criteria.narrow(_select_end_users(days, group_by, dialect))
        parts.append(_columns_of_sums(of_days, group_by, measures))
    return union_all(*parts).subquery() if parts else None


def can_sum_end_users(group_by: Sequence[str], criteria: "UsageFilter") -> bool:
    """Return whether a report may read the sums by end user."""
    return (
        "end_user" in group_by and set(group_by) <= BY_END_USER and criteria.models is None and criteria.key_id is None
    )


def days_of(since: Moment, until: Moment) -> list[datetime]:
    """Return the start of every day of a period, of its first and last day too. Raises BadRequest like `rows_of`."""
    since, end = _bounds(since, until)
    first, number = _start(since, DAY), (_start(end, DAY, up=True) - _start(since, DAY)).days
    return [first + i * DAY for i in range(number)]


def whole_days(since: Moment, until: Moment, among: Collection[datetime]) -> list[datetime]:
    """Return the days that lie entirely within a period. Without an end it includes the whole present day."""
    return sorted(day for day in among if (since is None or since <= day) and (until is None or day + DAY <= until))


def _columns_of_sums(part: Select[Any], group_by: Sequence[str], measures: Sequence[str]) -> Select[Any]:
    """Return rows in the columns of `sums_part`, or of `_select_end_users`."""
    columns = part.selected_columns
    own = "end_user" if "end_user" in group_by else "model"
    names = ("tenant_id", "tenant", own, *(name for name in PERIODS if name in group_by), *measures)
    return part.with_only_columns(*(columns[name] for name in names))


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a report; None: any. tenant: by name, also of a deleted tenant. models, tenant_ids: only these.

    end_users: only these, in a report by end user. owned_models: only these pairs of a tenant's id and a model, where
    that reads less; others of `tenant_ids` and `models` may be read too.
    """

    tenant_id: str | None = None
    tenant: str | None = None
    models: Sequence[str] | None = None
    key_id: str | None = None
    tenant_ids: Sequence[str] | None = None
    end_users: Sequence[str] | None = None
    owned_models: Sequence[tuple[str, str]] | None = None

    @property
    def is_of_all(self) -> bool:
        return self.tenant_id is None and self.tenant is None and self.tenant_ids is None

    def owners(self) -> list[ColumnElement[bool]]:
        """Return the conditions on the tenant, for `activity_series`."""
        columns = activity_series.c
        found = [columns.tenant_id == self.tenant_id] if self.tenant_id is not None else []
        if self.tenant is not None:
            found.append(columns.tenant == self.tenant)
        if self.tenant_ids is not None:
            found.append(columns.tenant_id.in_(self.tenant_ids))
        if self.owned_models is not None:
            found.append(tuple_(columns.tenant_id, columns.name).in_(self.owned_models))
        return found

    def narrow(self, query: Select[Any]) -> Select[Any]:
        columns = query.selected_columns
        if self.tenant_ids is not None:
            query = query.where(columns.tenant_id.in_(self.tenant_ids))
        if self.end_users is not None and "end_user" in columns:
            query = query.where(columns.end_user.in_(self.end_users))
        for name in ("tenant_id", "tenant", "key_id"):
            if (value := getattr(self, name)) is not None:
                query = query.where(columns[name] == value)
        return query if self.models is None else query.where(columns.model.in_(self.models))


def segments(since: Moment, until: Moment, *, days: bool = True) -> Iterator[tuple[Table, Moment, Moment]]:
    """Yield `[since, until)` in the cheapest segments: whole days, whole hours around them, rows at the edges.

    Every segment of hours lies within one day, and every segment of rows within one hour. days: False for a report by
    hour, which takes whole hours instead of days.
    """
    first_hour = None if since is None else _start(since, HOUR, up=True)
    last_hour = None if until is None else _start(until, HOUR)
    if first_hour is not None and last_hour is not None and first_hour > last_hour:
        yield from _unless_empty(usage, since, until)
        return
    yield from _unless_empty(usage, since, first_hour)
    yield from _unless_empty(usage, last_hour, until)
    if not days:
        if first_hour is None or last_hour is None or first_hour < last_hour:
            yield usage_hourly, first_hour, last_hour
        return
    first_day = None if first_hour is None else _start(first_hour, DAY, up=True)
    last_day = None if last_hour is None else _start(last_hour, DAY)
    if first_day is not None and last_day is not None and first_day > last_day:
        yield from _unless_empty(usage_hourly, first_hour, last_hour)
        return
    yield from _unless_empty(usage_hourly, first_hour, first_day)
    yield from _unless_empty(usage_hourly, last_day, last_hour)
    if first_day is None or last_day is None or first_day < last_day:
        yield usage_daily, first_day, last_day


def _row_segments(since: Moment, until: Moment, summed: Collection[datetime]) -> Iterator[tuple[Table, Moment, Moment]]:
    """Yield `[since, until)` without whole days that are summed, in segments of rows within a day each.

    Raises BadRequest for a too long period.
    """
    since, end = _bounds(since, until)
    whole = set(whole_days(since, until, summed))
    while since < end:
        next_day = _start(since + timedelta(microseconds=1), DAY, up=True)
        if since not in whole:
            yield usage, since, min(next_day, end)
        since = next_day


def _bounds(since: Moment, until: Moment) -> tuple[datetime, datetime]:
    """Return both ends of a period. Raises BadRequest for one that is too long for reading rows."""
    # Includes rows that are written while the report is made, or have the time of a clock that is ahead.
    end = until or datetime.now(UTC) + HOUR
    if since is None or end - since > timedelta(days=MOST_VERSION_DAYS, hours=1):
        raise BadRequest(
            f"since: expected the start of a period of at most {MOST_VERSION_DAYS} days for a report by version or by "
            "end user.",
            param="since",
        )
    return since, end


def _unless_empty(table: Table, start: Moment, end: Moment) -> Iterator[tuple[Table, Moment, Moment]]:
    """Yield a segment of rows or hours unless it is empty. A segment at an open end is empty, because days cover it."""
    if start is not None and end is not None and start < end:
        yield table, start, end


def _start(moment: datetime, period: timedelta, *, up: bool = False) -> datetime:
    """Return the start of the hour or day of `moment`. up: the next start instead, unless `moment` is a start."""
    moment = moment.astimezone(UTC)
    start = moment.replace(minute=0, second=0, microsecond=0)
    if period == DAY:
        start = start.replace(hour=0)
    return start + period if up and start < moment else start


def _select_span(table: Table, start: Moment, end: Moment, group_by: Sequence[str], dialect: str) -> Select[Any]:
    """Select a segment of rows or of sums, in columns of the same names."""
    at: ColumnElement[datetime] = TIMES[table]
    requests = literal(1) if table is usage else table.c.requests
    labels: list[ColumnElement[Any]] = []
    whole: ColumnElement[Any]
    for name in PERIODS:
        if name in group_by:
            # Every segment of hours lies within one day, except in a report by hour.
            within = name == "day" and table is not usage_daily and "hour" not in group_by
            is_start = (name == "day" and table is usage_daily) or (name == "hour" and table is usage_hourly)
            whole = at if is_start else start_of(name, at, dialect)
            if within and start is not None:
                whole = literal(_start(start, DAY), UtcDateTime)
            labels.append(whole.label(name))
    # 0 and "" stand for NULL, with which positions cannot be compared.
    if "version" in group_by:
        labels.append(func.coalesce(usage.c.version, 0).label("version"))
    if "end_user" in group_by:
        labels.append(func.coalesce(usage.c.end_user, "").label("end_user"))
    columns = (table.c.tenant_id, table.c.tenant, table.c.model, table.c.key_id, *labels)
    sums = (requests.label("requests"), *(table.c[name] for name in SUMMED[1:]))
    query = select(*columns, *sums)
    if start is not None:
        query = query.where(at >= start)
    if end is not None:
        query = query.where(at < end)
    return query


def _select_end_users(days: Sequence[datetime], group_by: Sequence[str], dialect: str) -> Select[Any]:
    """Select the sums by end user of these days, in the columns of `_columns_of_sums`.

    The days are listed, not bounded: the primary key continues with the tenant, so that one tenant's sums are read in
    one piece for each day.
    """
    table = usage_end_users.c
    labels: list[ColumnElement[Any]] = [table.day] if "day" in group_by else []
    if "month" in group_by:
        labels.append(start_of("month", table.day, dialect).label("month"))
    columns = (table.tenant_id, table.tenant, table.end_user, *labels, *(table[name] for name in SUMMED))
    return select(*columns).where(table.day.in_(days))


def start_of(period: str, at: ColumnElement[datetime], dialect: str) -> ColumnElement[Any]:
    """Return the start of the UTC hour, day or month of a time."""
    if dialect == "sqlite":
        # SQLite rounds a time to its millisecond, which may be in the next hour.
        return func.strftime(STARTS[period], func.substr(at, 1, 19), type_=UtcDateTime())
    return func.date_trunc(period, at, "UTC", type_=UtcDateTime())
