"""Sums of usage by tenant, and by tenant and model, from the sums for charts.

They have far fewer rows than the sums by key and model: one for each tenant and period.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ARRAY, BigInteger, ColumnElement, Select, Table, any_, func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.activity.tables import ACTIVITY, BASE, ENGINE, MODEL, OWN_BASE, TENANT, activity_series
from gateway.records.sql.database import Database
from gateway.records.sql.schema import UtcDateTime
from gateway.records.sql.tables import usage_daily

SUMMED = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "cost")
PERIODS = ("hour", "day", "month")


class TenantSums:
    """Check that the sums have all requests. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._complete = False

    async def complete(self) -> bool:
        """Return whether the sums have the requests of all days.

        After an update, earlier days are missing until they are rebuilt, the newest first
        (gateway/billing/activity_rebuild.py), so it suffices to check the oldest day.
        """
        if not self._complete:
            async with self._database.read() as connection:
                oldest = (await connection.execute(select(func.min(usage_daily.c.day)))).scalar_one()
                known, summed = (0, 0) if oldest is None else await count_day(connection, oldest)
            self._complete = known == summed
        return self._complete


async def count_day(connection: AsyncConnection, day: datetime) -> tuple[int, int]:
    """Return a day's requests in the sums for reports and in those for charts, as of one moment."""
    table = ACTIVITY[86400]
    known = select(func.coalesce(func.sum(usage_daily.c.requests), 0)).where(usage_daily.c.day == day)
    summed = select(func.coalesce(func.sum(table.c.requests), 0)).where(
        table.c.kind == ENGINE, table.c.start == int(day.timestamp())
    )
    row = (await connection.execute(select(known.scalar_subquery(), summed.scalar_subquery()))).one()
    return int(row[0]), int(row[1])


def can_sum(group_by: Sequence[str], models: Sequence[str] | None, key_id: str | None) -> bool:
    """Return whether these sums can answer a report. They have a sum for each model, but one for all mixtures."""
    if models is None:
        return key_id is None and set(group_by) <= {"tenant", *PERIODS}
    return key_id is None and set(group_by) <= {"tenant", "model", *PERIODS} and not any("*" in name for name in models)


def sums_part(
    level: int,
    bounds: tuple[datetime | None, datetime | None],
    group_by: Sequence[str],
    dialect: str,
    *,
    owners: Sequence[ColumnElement[bool]] = (),
    models: Sequence[str] | None = None,
    measures: Sequence[str] = SUMMED,
) -> Select[Any]:
    """Select the sums of hours or days (3600 or 86400) in the columns of `rows_of`.

    Without owners and the groups "tenant" and "model", the tenants' and models' columns are empty. owners: conditions
    on the columns of `activity_series`. measures: the columns of sums.
    """
    table, names = ACTIVITY[level], activity_series.c
    is_total = not {"tenant", "model"} & set(group_by) and not owners
    # The series of engines and of base models have the same totals as those of tenants, in far fewer rows.
    if models is None:
        kinds = [ENGINE if is_total else TENANT]
    else:
        kinds = [MODEL, BASE if is_total else OWN_BASE]
    which: list[ColumnElement[bool]] = []
    since, until = bounds
    if since is not None:
        which.append(table.c.start >= int(since.timestamp()))
    if until is not None:
        which.append(table.c.start < int(until.timestamp()))
    which.append(series_of(kinds, owners, models, table, dialect))
    sums = [func.sum(table.c[name]).label(name) for name in measures]
    if is_total:
        nobody: list[ColumnElement[Any]] = [literal("").label(name) for name in ("tenant_id", "tenant", "model")]
        # The few starts are named after they are summed. They are not grouped further, as the report does it.
        found = select(table.c.start, *sums).where(*which).group_by(table.c.start).subquery()
        labels = [_start_of(name, found.c.start, dialect).label(name) for name in PERIODS if name in group_by]
        return select(*nobody, *labels, *(found.c[name] for name in measures))
    labels = [_start_of(name, table.c.start, dialect).label(name) for name in PERIODS if name in group_by]
    rows = select(table.c.series_id, *labels, *sums).where(*which).group_by(table.c.series_id, *labels).subquery()
    columns = (names.tenant_id, names.tenant, names.name.label("model"))
    query = select(*columns, *(rows.c[label.name] for label in labels), *(rows.c[name] for name in measures))
    return query.join_from(rows, activity_series, names.id == rows.c.series_id)


def series_of(
    kinds: Sequence[int],
    owners: Sequence[ColumnElement[bool]],
    models: Sequence[str] | None,
    table: Table,
    dialect: str,
) -> ColumnElement[bool]:
    """Return the condition that a sum of `table` belongs to such a series; for the arguments see `sums_part`."""
    if not owners and models is None:
        return table.c.kind.in_(kinds)
    names = activity_series.c
    own = [*owners, names.kind.in_(kinds), *([] if models is None else [names.name.in_(models)])]
    # Series of known ids are read by the index of ids, all series of a kind by the primary key.
    return is_in(table.c.series_id, select(names.id).where(*own), dialect)


def is_in(column: ColumnElement[int], ids: Select[Any], dialect: str) -> ColumnElement[bool]:
    """Return the condition that a value is among the selected ids, which are few.

    PostgreSQL overestimates the number of ids of a subquery, and would read the whole table instead of its index.
    """
    if dialect == "sqlite":
        return column.in_(ids)
    return column == any_(func.array(ids.scalar_subquery(), type_=ARRAY(BigInteger)))


# SQLite's forms of starts, as `UtcDateTime` stores times.
STARTS = {"hour": "%Y-%m-%d %H:00:00.000000", "day": "%Y-%m-%d 00:00:00.000000", "month": "%Y-%m-01 00:00:00.000000"}


def _start_of(period: str, seconds: ColumnElement[int], dialect: str) -> ColumnElement[Any]:
    if dialect == "sqlite":
        return func.strftime(STARTS[period], seconds, "unixepoch", type_=UtcDateTime())
    return func.date_trunc(period, func.to_timestamp(seconds), "UTC", type_=UtcDateTime())
