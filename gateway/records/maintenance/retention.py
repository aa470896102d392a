"""Removal of old records: sums by minute and, if the operator wants it, usage rows, and later the sums by hour and day.

Sums by end user are removed with the rows, because they name persons and may be as many. Partitions of `usage` that
are old as a whole are detached and dropped; other rows are deleted.
"""

from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, Select, Table, delete, func, select, tuple_

from gateway.records.activity.tables import ACTIVITY, BASE, ENGINE, MODEL, OWN_BASE, TENANT
from gateway.records.partitions.partitions import Partitions, count_rows, noting
from gateway.records.periods import DAY, HOUR, MINUTE, SPARE
from gateway.records.requests.refusal_tables import refusal_counts
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage, usage_daily, usage_hourly
from gateway.records.usage.end_user_tables import usage_end_user_days, usage_end_users

# Kinds of series in the sums for charts.
KINDS = (TENANT, MODEL, ENGINE, OWN_BASE, BASE)
# Maximum rows per transaction, so that no other writer waits for long; and maximum rows per run.
AT_ONCE, MAX_REMOVED = 1000, 2_000_000


class Retention:
    """Remover of old records. Raises Unavailable while the database is away.

    A partition that cannot be removed stops neither the others nor the deletions. Its error is raised at the end.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._partitions = Partitions(database)

    async def prune_minutes(self, kept: timedelta) -> int:
        """Remove sums by minute that are older than `kept`. Returns their number."""
        before = int((datetime.now(UTC) - kept - SPARE).timestamp())
        table, removed = ACTIVITY[MINUTE], 0
        for kind in KINDS:
            removed += await self._remove(table, table.c.kind == kind, table.c.start < before)
        counts = refusal_counts
        return removed + await self._remove(counts, counts.c.level == MINUTE, counts.c.start < before)

    async def prune_usage(self, kept: timedelta | None) -> int:
        """Remove usage rows that are older than `kept`; None keeps all. Returns their number.

        Raises SQLAlchemy's errors if the database refuses to remove a partition.
        """
        if kept is None:
            return 0
        before = datetime.now(UTC) - kept
        failures = await self._partitions.detach(before)
        dropped, _ = await self._drop_detached(failures)
        deleted, _ = await self._delete_usage(before, MAX_REMOVED)
        if deleted < MAX_REMOVED:
            await self._remove_end_users(before)
        if failures:
            raise failures[0]
        return dropped + deleted

    async def prune_sums(self, kept: timedelta | None) -> int:
        """Remove sums by hour and day, and by end user, of days that ended before `kept`; None keeps all.

        Returns the number of those by hour and day. Usage rows must not outlive their sums, which would be rebuilt from
        them, so nothing is removed while such a row is left. The sums for reports go first, day by day: by their oldest
        day other code knows which sums are complete.
        """
        if kept is None:
            return 0
        first = _day_of(datetime.now(UTC) - kept)
        if await self._has_usage(first):
            return 0
        await self._remove_end_users(first)
        removed = await self._remove_days(usage_daily, usage_daily.c.day, first)
        removed += await self._remove_days(usage_hourly, usage_hourly.c.hour, first)
        before, counts = int(first.timestamp()), refusal_counts
        for level in (DAY, HOUR):
            sums = ACTIVITY[level]
            for kind in KINDS:
                removed += await self._remove(sums, sums.c.kind == kind, sums.c.start < before)
            removed += await self._remove(counts, counts.c.level == level, counts.c.start < before)
        return removed

    async def _has_usage(self, before: datetime) -> bool:
        async with self._database.read() as connection:
            return (await connection.execute(_older(before).limit(1))).first() is not None

    async def count_usage(self, before: datetime) -> tuple[int, int]:
        """Return the number of usage rows before a given time, and their cost in micro-units."""
        detached, its_cost = await self._partitions.count_detached()
        async with self._database.read() as connection:
            rows, cost = await count_rows(connection, usage, before)
        return detached + rows, its_cost + cost

    async def remove_usage(self, before: datetime, most: int) -> tuple[int, int]:
        """Remove the usage rows before a given time: whole partitions, then at most `most` rows one by one.

        Returns the number and cost of all. The sums by end user go once no such row is left. Raises SQLAlchemy's errors
        if the database refuses to remove a partition.
        """
        failures = await self._partitions.detach(before)
        dropped, its_cost = await self._drop_detached(failures)
        deleted, cost = await self._delete_usage(before, most)
        if not await self._has_usage(before):
            await self._remove_end_users(before)
        if failures:
            raise failures[0]
        return dropped + deleted, its_cost + cost

    async def _delete_usage(self, before: datetime, most: int) -> tuple[int, int]:
        """Delete at most `most` usage rows before a given time. Returns their number and cost."""
        deleted = cost = 0
        while deleted < most:
            some = _older(before).limit(min(AT_ONCE, most - deleted))
            async with self._database.write() as connection:
                # The ids are a list: with a subquery PostgreSQL may read all partitions to join them with it.
                ids = list((await connection.execute(some)).scalars())
                remove = delete(usage).where(usage.c.request_id.in_(ids)).returning(usage.c.cost)
                costs = list((await connection.execute(remove)).scalars())
            deleted, cost = deleted + len(costs), cost + sum(costs)
            if len(ids) < AT_ONCE:
                break
        return deleted, cost

    async def _drop_detached(self, failures: list[Exception]) -> tuple[int, int]:
        """Drop the detached tables, also those of a stopped removal. Returns the number and cost of their rows.

        Appends errors to failures.
        """
        removed = cost = 0
        for name in await self._partitions.detached():
            with noting(failures, name):
                dropped = await self._partitions.drop(name)
                removed, cost = removed + dropped[0], cost + dropped[1]
        return removed, cost

    async def _remove_end_users(self, before: datetime) -> None:
        """Remove the sums by end user of the days that ended before a given time."""
        first = _day_of(before)
        # Without its numbers a day does not count as complete, so no report shows the rest of its sums as exact.
        await self._remove(usage_end_user_days, usage_end_user_days.c.day < first)
        await self._remove_days(usage_end_users, usage_end_users.c.day, first)

    async def _remove_days(self, table: Table, period: ColumnElement[datetime], first: datetime) -> int:
        """Remove the sums of the periods before `first`, the oldest first. Returns their number.

        The periods are found in the table, so that those left by a run that stopped are removed by the next one.
        """
        removed = 0
        while removed < MAX_REMOVED:
            async with self._database.read() as connection:
                oldest = (await connection.execute(select(func.min(period)))).scalar_one()
            if oldest is None or oldest >= first:
                break
            removed += await self._remove(table, period == oldest)
        return removed

    async def _remove(self, table: Table, *which: ColumnElement[bool]) -> int:
        keys = list(table.primary_key.columns)
        removed, some = 0, select(*keys).where(*which).limit(AT_ONCE)
        chosen = keys[0].in_(some) if len(keys) == 1 else tuple_(*keys).in_(some)
        while removed < MAX_REMOVED:
            async with self._database.write() as connection:
                count = (await connection.execute(delete(table).where(chosen))).rowcount
            removed += count
            if count < AT_ONCE:
                break
        return removed


def _day_of(moment: datetime) -> datetime:
    """Return the start of the day (UTC) of `moment`."""
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _older(before: datetime) -> Select[tuple[str]]:
    """Return the query of the ids of the usage rows before a given time."""
    return select(usage.c.request_id).where(usage.c.created_at < before)
