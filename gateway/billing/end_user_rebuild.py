"""Rebuilding of the sums by end user from usage rows, for rows that an earlier release wrote without such sums.

A tenant's day is rebuilt if its sums by end user count a different number of requests than its sums for reports, which
every release has written. So no marker is needed, and days that an earlier release writes during an upgrade are found.

On PostgreSQL a transaction locks out all writers of usage rows while it counts and sums the rows of its tenants' day.
Smaller tenants share transactions of at most MAX_REQUESTS, but a larger tenant's whole day is one transaction, whose
length has no other bound than the number of its requests. Settled rows wait in Redis until it ends.
"""

import asyncio
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Insert,
    delete,
    func,
    insert,
    literal,
    literal_column,
    select,
    text,
    union_all,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.sql.database import Database
from gateway.records.sql.schema import UtcDateTime
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import usage, usage_daily
from gateway.records.usage.end_user_tables import SUMMED, usage_end_user_days, usage_end_users

# Maximum number of tenants and of their requests in one transaction, which locks out writers of usage rows. A tenant
# with more requests has a transaction of its own, with a statement for each hour, so that none reaches its time-out.
MAX_TENANTS, MAX_REQUESTS = 200, 20_000


class EndUserRebuild:
    """Rebuilder of the sums by end user. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def check(self, day: datetime, pause: float) -> bool:
        """Rebuild the sums of the tenants of a day that need it. Returns whether there were any.

        pause: seconds after each transaction, so that the ledger and readers come first.
        """
        async with self._database.read() as connection:
            lacking = await _lacking(connection, day)
            # After retention has removed a day's rows, nothing is left to rebuild it from.
            query = select(usage.c.request_id).where(*_in_day(day)).limit(1)
            if not lacking or (await connection.execute(query)).first() is None:
                return False
        rebuilt = False
        for ids in _batches(lacking):
            rebuilt |= await self._replace(day, ids)
            await asyncio.sleep(pause)
        return rebuilt

    async def _replace(self, day: datetime, ids: list[str]) -> bool:
        """Replace the sums of tenants all of whose rows exist. Returns whether there were any."""
        async with self._database.write() as connection:
            if self._database.dialect == "postgresql":
                # Lock out writers of usage rows until the transaction ends. SQLite does so itself.
                await connection.execute(text("LOCK TABLE usage IN SHARE MODE"))
            query = select(usage.c.tenant_id, func.count()).where(usage.c.tenant_id.in_(ids), *_in_day(day))
            rows: dict[str, int] = dict((await connection.execute(query.group_by(usage.c.tenant_id))).all())
            known = await _known(connection, day, ids)
            whole = sorted(tenant_id for tenant_id, number in known.items() if rows.get(tenant_id) == number)
            if not whole:
                return False
            for table in (usage_end_users, usage_end_user_days):
                await connection.execute(delete(table).where(table.c.day == day, table.c.tenant_id.in_(whole)))
            for since, until in _spans(day, sum(rows[tenant_id] for tenant_id in whole)):
                await connection.execute(_sums_of_rows(self._database.dialect, day, whole, since, until))
            await connection.execute(_days_of_sums(day, whole))
        return True


def _batches(lacking: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the tenants' ids, some at a time."""
    some: list[str] = []
    size = 0
    for tenant_id, number in sorted(lacking.items()):
        if some and (len(some) == MAX_TENANTS or size + number > MAX_REQUESTS):
            yield some
            some, size = [], 0
        some.append(tenant_id)
        size += number
    if some:
        yield some


async def _known(connection: AsyncConnection, day: datetime, ids: list[str]) -> dict[str, int]:
    """Return the requests of a day of these tenants, by the sums for reports."""
    query = select(usage_daily.c.tenant_id, int_sum(usage_daily.c.requests)).where(usage_daily.c.day == day)
    found = await connection.execute(query.where(usage_daily.c.tenant_id.in_(ids)).group_by(usage_daily.c.tenant_id))
    return dict(found.all())


async def _lacking(connection: AsyncConnection, day: datetime) -> dict[str, int]:
    """Return the requests of a day of the tenants whose sums by end user count another number.

    A single statement reads both, so that it sees a row that is being written in both or in neither.
    """
    days, zero = usage_end_user_days.c, literal_column("0", BigInteger)
    known = select(usage_daily.c.tenant_id, usage_daily.c.requests.label("known"), zero.label("summed"))
    summed = select(days.tenant_id, zero, days.requests).where(days.day == day)
    both = union_all(known.where(usage_daily.c["day"] == day), summed).subquery()
    number = int_sum(both.c.known)
    query = select(both.c.tenant_id, number).group_by(both.c.tenant_id).having(number != int_sum(both.c.summed))
    return dict((await connection.execute(query)).all())


def _in_day(day: datetime) -> list[ColumnElement[bool]]:
    return [usage.c.created_at >= day, usage.c.created_at < day + timedelta(days=1)]


def _spans(day: datetime, requests: int) -> list[tuple[datetime, datetime]]:
    """Return the parts of a day whose rows are summed in one statement."""
    number = 1 if requests <= MAX_REQUESTS else 24
    bounds = [day + i * timedelta(days=1) / number for i in range(number + 1)]
    return list(pairwise(bounds))


def _sums_of_rows(dialect: str, day: datetime, ids: list[str], since: datetime, until: datetime) -> Executable:
    """Return the statement that adds tenants' rows to the sums, as `end_user_writer.sums_of` makes them."""
    end_user = func.coalesce(usage.c.end_user, "")
    sums: list[ColumnElement[Any]] = [func.count(), *(func.sum(usage.c[name]) for name in SUMMED[1:])]
    found = (
        select(literal(day, UtcDateTime), usage.c.tenant_id, end_user, func.min(usage.c.tenant), *sums)
        .where(usage.c.tenant_id.in_(ids), usage.c.created_at >= since, usage.c.created_at < until)
        .group_by(usage.c.tenant_id, end_user)
    )
    adding = (postgresql if dialect == "postgresql" else sqlite).insert(usage_end_users)
    added = adding.from_select(usage_end_users.c.keys(), found)
    return added.on_conflict_do_update(
        index_elements=list(usage_end_users.primary_key.columns),
        set_={name: usage_end_users.c[name] + added.excluded[name] for name in SUMMED},
    )


def _days_of_sums(day: datetime, ids: list[str]) -> Insert:
    """Return the statement that inserts the number and maxima of tenants' sums."""
    sums = usage_end_users.c
    found = (
        select(
            literal(day, UtcDateTime),
            sums.tenant_id,
            func.count(),
            func.sum(sums.requests),
            *(func.max(sums[name]) for name in SUMMED),
        )
        .where(sums.day == day, sums.tenant_id.in_(ids))
        .group_by(sums.tenant_id)
    )
    return insert(usage_end_user_days).from_select(usage_end_user_days.c.keys(), found)
