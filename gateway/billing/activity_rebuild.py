"""Rebuilding of the sums for charts, and by end user, from usage rows that an earlier release wrote without such sums.

A day is rebuilt if its sums for charts count a different number of requests than its sums for reports, which every
release has written. So no marker is needed, and days that an earlier release writes during an upgrade are found too.
"""

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    Table,
    TextClause,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.billing.activity_writer import COLUMNS, MIXTURES, Series, series_of
from gateway.billing.end_user_rebuild import EndUserRebuild
from gateway.records.activity import tables as charts
from gateway.records.activity.tables import ACTIVITY, BOUNDS, STATUSES, activity_series
from gateway.records.periods import DAY, HOUR, MINUTE, SPARE
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import UtcDateTime, usage, usage_daily, usage_hourly
from gateway.records.usage.tenant_sums import count_day

log = logging.getLogger(__name__)

# Pause after each hour, so that the ledger and readers come first; and number of series decoded without a pause.
PAUSE_SECONDS = 0.05
AT_ONCE = 500
KINDS = (charts.TENANT, charts.MODEL, charts.ENGINE, charts.OWN_BASE, charts.BASE)


class ActivityRebuild:
    """Rebuilder of the sums. minutes_kept: how long sums by minute are kept. Raises Unavailable."""

    def __init__(self, database: Database, minutes_kept: timedelta) -> None:
        self._database = database
        self._minutes_kept = minutes_kept
        self._end_users = EndUserRebuild(database)
        # Requests of past days that need no check while that number stays: their sums are right, or retention has
        # removed the rows to rebuild them from. A gateway of an earlier release may write rows of its journal late.
        self._settled: dict[datetime, int] = {}

    async def run(self) -> int:
        """Rebuild the days that need it, the newest first. Returns their number."""
        edges = select(func.min(usage_daily.c.day), func.max(usage_daily.c.day))
        async with self._database.read() as connection:
            first, day = (await connection.execute(edges)).one()
        # Rows of the day before may still arrive from a gateway of an earlier release.
        rebuilt, yesterday = 0, datetime.now(UTC).date() - timedelta(days=1)
        while day is not None and day >= first:
            # Read before the check: a row that is written during it is found by the next one.
            number = await self._requests(day)
            if self._settled.get(day) != number:
                charts, end_users = await self._check(day), await self._end_users.check(day, PAUSE_SECONDS)
                rebuilt += charts or end_users
                if day.date() < yesterday:
                    self._settled[day] = number
            day -= timedelta(days=1)
        return rebuilt

    async def _requests(self, day: datetime) -> int:
        query = select(int_sum(usage_daily.c.requests)).where(usage_daily.c["day"] == day)
        async with self._database.read() as connection:
            return (await connection.execute(query)).scalar_one()

    async def _check(self, day: datetime) -> bool:
        """Rebuild a day if it needs it. Returns whether it did."""
        async with self._database.read() as connection:
            known, summed = await count_day(connection, day)
        if known == summed:
            return False
        async with self._database.read() as connection:
            query = select(func.count()).select_from(usage).where(*_in_day(day))
            rows = (await connection.execute(query)).scalar_one()
        if rows < known:
            log.info("charts of %s stay incomplete: %d of %d usage rows are left", f"{day:%Y-%m-%d}", rows, known)
            return False
        await self._insert_series(day)
        start, at = int(day.timestamp()), usage_hourly.c["hour"]
        used = select(at).where(at >= day, at < day + timedelta(days=1)).distinct().order_by(at)
        async with self._database.read() as connection:
            hours = list((await connection.execute(used)).scalars())
        for hour in hours:
            await self._replace_hour(int(hour.timestamp()))
            await asyncio.sleep(PAUSE_SECONDS)
        async with self._database.write() as connection:
            await self._lock(connection)
            await _clear(connection, ACTIVITY[DAY], start)
            await connection.execute(_day_of_hours(start))
        return True

    async def _insert_series(self, day: datetime) -> None:
        """Insert the series of the day's rows that are missing."""
        columns = (usage.c.tenant_id, usage.c.tenant, usage.c.model, usage.c.engine, usage.c.adapter_digest.is_(None))
        query = select(*columns).where(*_in_day(day)).distinct()
        found: dict[int, Series] = {}
        async with self._database.read() as connection:
            async for rows in (await connection.stream(query)).partitions(AT_ONCE):
                for *named, is_base in rows:
                    found |= {each.id: each for each in series_of(*named, is_base=bool(is_base))}
                await asyncio.sleep(0)
        ids = sorted(found)
        dialect = postgresql if self._database.dialect == "postgresql" else sqlite
        statement = dialect.insert(activity_series).on_conflict_do_nothing()
        for start in range(0, len(ids), AT_ONCE):
            async with self._database.write() as connection:
                some = [msgspec.structs.asdict(found[series_id]) for series_id in ids[start : start + AT_ONCE]]
                await connection.execute(statement, some)

    async def _replace_hour(self, hour: int) -> None:
        """Replace the sums of an hour, and of its minutes if they are kept."""
        minutes_from = int((datetime.now(UTC) - self._minutes_kept - SPARE).timestamp())
        since, until = (datetime.fromtimestamp(moment, UTC) for moment in (hour, hour + HOUR))
        times = {"start": hour, "since": since, "until": until}
        async with self._database.write() as connection:
            await self._lock(connection)
            for level in (HOUR, MINUTE) if hour >= minutes_from else (HOUR,):
                await _clear(connection, ACTIVITY[level], hour, HOUR // level)
                for kind in KINDS:
                    await connection.execute(_sums_of_rows(self._database.dialect, level, kind), times)

    async def _lock(self, connection: AsyncConnection) -> None:
        """Lock out writers of usage rows until the transaction ends. SQLite does so itself."""
        if self._database.dialect == "postgresql":
            await connection.execute(text("LOCK TABLE usage IN SHARE MODE"))


def _in_day(day: datetime) -> list[ColumnElement[bool]]:
    return [usage.c.created_at >= day, usage.c.created_at < day + timedelta(days=1)]


async def _clear(connection: AsyncConnection, table: Table, start: int, periods: int = 1) -> None:
    level = next(level for level, each in ACTIVITY.items() if each is table)
    end = start + periods * level
    await connection.execute(delete(table).where(table.c.kind.in_(KINDS), table.c.start >= start, table.c.start < end))


@cache
def _sums_of_rows(dialect: str, level: int, kind: int) -> TextClause:
    """Return the statement that inserts an hour's sums of a kind, as `activity_writer.add_row` makes them.

    Its parameters are `start` in Unix seconds, `since` and `until`. It is cached, because building it costs more than
    executing it for an hour with few rows.
    """
    model, is_base = usage.c.model, usage.c.adapter_digest.is_(None)
    mixed = func.replace(model, "*", "") != model
    plain = and_(~mixed, is_base)
    keys: dict[str, ColumnElement[Any]] = {
        **({"tenant_id": usage.c.tenant_id} if kind in (charts.TENANT, charts.MODEL, charts.OWN_BASE) else {}),
        **(
            {"name": case((mixed, MIXTURES), else_=model)}
            if kind in (charts.MODEL, charts.OWN_BASE, charts.BASE)
            else {}
        ),
        **({"name": func.coalesce(usage.c.engine, "")} if kind == charts.ENGINE else {}),
    }
    which = {charts.MODEL: [or_(mixed, ~is_base)], charts.OWN_BASE: [plain], charts.BASE: [plain]}.get(kind, [])
    start: ColumnElement[int] = literal_column("CAST(:start AS BIGINT)", BigInteger)
    groups = list(keys.values())
    if level < HOUR:
        start = _minute_of(dialect)
        groups.append(start)
    times = (usage.c.created_at >= literal_column(":since"), usage.c.created_at < literal_column(":until"))
    labels = (*(value.label(key) for key, value in keys.items()), *(sum_.label(c) for c, sum_ in _values().items()))
    rows = select(start.label("start"), *labels).where(*times, *which).group_by(*groups).subquery("rows")
    series = activity_series.c
    same = (rows.c[key] == series[key] for key in keys)
    found = select(series.kind, rows.c.start, series.id, *(rows.c[column] for column in COLUMNS)).join_from(
        rows, activity_series, and_(series.kind == kind, *same)
    )
    statement = insert(ACTIVITY[level]).from_select(["kind", "start", "series_id", *COLUMNS], found)
    by_name = postgresql.dialect() if dialect == "postgresql" else sqlite.dialect()
    sql = str(statement.compile(dialect=by_name, compile_kwargs={"literal_binds": True}))
    return text(sql).bindparams(bindparam("since", type_=UtcDateTime), bindparam("until", type_=UtcDateTime))


def _minute_of(dialect: str) -> ColumnElement[int]:
    at = usage.c.created_at
    if dialect == "sqlite":
        # SQLite rounds a time to its millisecond, which may be in the next minute.
        return cast(func.strftime("%s", func.substr(at, 1, 19)), BigInteger).op("/")(MINUTE) * MINUTE
    return cast(func.floor(func.extract("epoch", at) / MINUTE) * MINUTE, BigInteger)


def _values() -> dict[str, ColumnElement[Any]]:
    """Return the sums of rows by column. An unknown status counts as an error; a bucket without rows is NULL."""
    status = usage.c.status
    found: dict[str, ColumnElement[Any]] = {"requests": func.count()}
    for name in STATUSES:
        is_this = status == name if name != "error" else status.not_in([each for each in STATUSES if each != name])
        found[name] = func.count().filter(is_this)
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost", "queue_ms", "ttft_ms", "latency_ms"):
        found[name] = func.coalesce(func.sum(usage.c[name]), 0)
    for name, value in ((charts.LATENCY_MAX, usage.c.latency_ms), (charts.TTFT_MAX, usage.c.ttft_ms)):
        found[name] = func.nullif(func.max(value), 0)
    for names, value in ((charts.LATENCY, usage.c.latency_ms), (charts.TTFT, usage.c.ttft_ms)):
        for name, low, high in zip(names, (None, *BOUNDS), (*BOUNDS, None), strict=True):
            within = [*([] if low is None else [value > low]), *([] if high is None else [value <= high])]
            found[name] = func.nullif(func.count().filter(and_(*within)), 0)
    return found


def _day_of_hours(start: int) -> Insert:
    """Return the statement that inserts a day's sums from its hours'."""
    hours = ACTIVITY[HOUR]
    sums = (getattr(func, charts.aggregate(name))(hours.c[name]) for name in COLUMNS)
    found = (
        select(hours.c.kind, literal(start, BigInteger), hours.c.series_id, *sums)
        .where(hours.c.kind.in_(KINDS), hours.c.start >= start, hours.c.start < start + DAY)
        .group_by(hours.c.kind, hours.c.series_id)
    )
    return insert(ACTIVITY[DAY]).from_select(["kind", "start", "series_id", *COLUMNS], found)
