"""Monthly partitions of the table `usage` on PostgreSQL, which `loraplex usage partition` makes of a plain table.

A unique index of a partitioned table must contain the partition key. The key is therefore the request id itself, which
stays the primary key: whatever is written twice has one id, so it meets its first row in the same partition, whatever
its two times are. Ids begin with their time (gateway/records/partitions/request_ids.py), so a range of ids is a month:

usage_first        rows from before the partitioning, ids from its month, and random ids, which gateways of the previous
                   release make
usage_202612       ids from December 2026
usage_default      ids of months without a partition, of a gateway with a wrong clock

A month's partition may have a few rows of the month before or after it by `created_at`, which is Redis' time, while ids
have the gateways' time. Every removal therefore compares `created_at`.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from sqlalchemy import MetaData, Table, func, select, text
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.error_codes import DATABASE_UNAVAILABLE
from gateway.errors import Unavailable
from gateway.records.sql.database import MIGRATION_LOCK, Database
from gateway.records.sql.lock_waits import waiting_at_most
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import usage
from gateway.sql_states import UNDEFINED_TABLE, sql_state

log = logging.getLogger(__name__)
T = TypeVar("T")

# Beginning of ids with a time. It follows all random ids, whose next character is a hexadecimal digit.
TIMED = "req_g"
FIRST, DEFAULT, DETACHED = "usage_first", "usage_default", "usage_detached_"
# Number of months after the present one that have partitions, and maximum number of rows that are moved from the
# default partition to a new one. They are moved under a lock.
AHEAD, MOVED = 3, 100_000
# Maximum wait for a lock, and pause before the next attempt. Other transactions queue behind the wait, so it is short.
LOCK_MS, RETRY_SECONDS = 1000, 1.0
# Attempts to detach a partition.
TRIES = 5
HOUR, FOREVER = timedelta(hours=1), datetime.max.replace(tzinfo=UTC)


class Partition(NamedTuple):
    """A partition. until: id before which its ids end; None for the default one."""

    name: str
    until: str | None


def first_id(month: date) -> str:
    """Return a text that precedes all ids of a month and follows those of earlier months."""
    return f"{TIMED}{month:%Y%m}"


def month_of(request_id: str) -> date | None:
    """Return the month with which an id begins; None for another form."""
    match = re.match(rf"{TIMED}(2\d{{3}})(0[1-9]|1[0-2])\d{{8}}", request_id)
    return None if match is None else date(int(match[1]), int(match[2]), 1)


def next_month(month: date) -> date:
    return (month.replace(day=1) + timedelta(days=31)).replace(day=1)


async def is_partitioned(database: Database) -> bool:
    """Return whether `usage` has partitions. Raises Unavailable."""
    if database.dialect != "postgresql":
        return False
    async with database.read() as connection:
        return await has_partitions(connection)


async def has_partitions(connection: AsyncConnection) -> bool:
    kind = "SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass('usage')"
    return bool((await connection.execute(text(kind))).scalar_one_or_none())


async def read_partitions(connection: AsyncConnection) -> list[Partition]:
    """Return the partitions by their names."""
    query = (
        "SELECT relname, pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid IN "
        "(SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass('usage')) ORDER BY relname"
    )
    rows = (await connection.execute(text(query))).all()
    bounds = [(name, re.search(r" TO \('(.*)'\)$", bound)) for name, bound in rows]
    return [Partition(name, None if match is None else match[1]) for name, match in bounds]


def waiting_briefly(database: Database) -> AbstractAsyncContextManager[AsyncConnection]:
    """Open a transaction that waits for each lock at most LOCK_MS. Raises Unavailable if one is not free in time."""
    return waiting_at_most(database, LOCK_MS / 1000, _in_use)


def _in_use() -> Unavailable:
    message = "The table usage is in use by other transactions; try again shortly."
    return Unavailable(message, code=DATABASE_UNAVAILABLE)


@asynccontextmanager
async def changing_partitions(database: Database) -> AsyncIterator[AsyncConnection]:
    """Open a transaction as `waiting_briefly` does, which no migration and no other change of partitions overlaps."""
    async with waiting_briefly(database) as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        yield connection


@contextmanager
def noting(failures: list[Exception], name: str) -> Iterator[None]:
    """Log a failed change of a table and append the error to failures, so that the caller continues with others."""
    try:
        yield
    except (Unavailable, DBAPIError) as error:
        log.warning("the table %s stays until the next removal: %s", name, error)
        failures.append(error)


class Partitions:
    """Maker and remover of partitions. Does nothing on SQLite and on a plain table. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def make(self) -> int:
        """Make the missing partitions of this month and the next AHEAD months. Returns their number."""
        if not await is_partitioned(self._database):
            return 0
        month, made = datetime.now(UTC).date().replace(day=1), 0
        for _ in range(AHEAD + 1):
            async with changing_partitions(self._database) as connection:
                made += await make_month(connection, month)
            month = next_month(month)
        return made

    async def detached(self) -> list[str]:
        """Return the tables that a removal has detached and not dropped, because it was stopped."""
        if self._database.dialect != "postgresql":
            return []
        query = (
            f"SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^{DETACHED}' "
            "AND pg_table_is_visible(oid) ORDER BY relname"
        )
        async with self._database.read() as connection:
            return list((await connection.execute(text(query))).scalars())

    async def detach(self, before: datetime) -> list[Exception]:
        """Detach the partitions all of whose rows are older than a given time. They leave reports at once.

        Returns the failures, which are logged; other partitions are detached all the same.
        """
        failures: list[Exception] = []
        if not await is_partitioned(self._database):
            return failures
        async with self._database.read() as connection:
            found = await read_partitions(connection)
            names = [each.name for each in found if await _is_old(connection, each, before)]
        for name in names:
            with noting(failures, name):
                await patiently(partial(self._detach, name, before), TRIES)
        return failures

    async def _detach(self, name: str, before: datetime) -> None:
        async with changing_partitions(self._database) as connection:
            await connection.execute(text("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE"))
            here = {each.name: each for each in await read_partitions(connection)}
            # A row may have arrived, or another process may have detached it.
            if name in here and await _is_old(connection, here[name], before):
                await connection.execute(text(f"ALTER TABLE usage DETACH PARTITION {name}"))
                await connection.execute(text(f"ALTER TABLE {name} RENAME TO {_detached_name(name)}"))
                log.info("partition %s of usage is detached: all of its rows are from before %s", name, before)

    async def drop(self, name: str) -> tuple[int, int]:
        """Drop a detached table. Returns the number and cost of its rows, zeros if another process has dropped it."""
        # No statement writes to a detached table, so it is counted without the lock that migrations wait for.
        counted = await self._count(name)
        async with changing_partitions(self._database) as connection:
            if (await connection.execute(text("SELECT to_regclass(:name)"), {"name": name})).scalar_one() is None:
                return 0, 0
            await connection.execute(text(f"DROP TABLE {name}"))
        return counted

    async def count_detached(self) -> tuple[int, int]:
        """Return the number and cost of the rows of detached tables."""
        rows = cost = 0
        for name in await self.detached():
            found = await self._count(name)
            rows, cost = rows + found[0], cost + found[1]
        return rows, cost

    async def _count(self, name: str) -> tuple[int, int]:
        """Return the number and cost of a detached table's rows, zeros if another process has dropped it."""
        try:
            async with self._database.read() as connection:
                return await count_rows(connection, _usage_as(name))
        except ProgrammingError as error:
            if sql_state(error) != UNDEFINED_TABLE:
                raise
            return 0, 0


async def count_rows(connection: AsyncConnection, rows: Table, before: datetime = FOREVER) -> tuple[int, int]:
    """Return the number and cost of the usage rows before a given time, in one statement for each hour with rows.

    A day may have more rows than a statement can read in its time.
    """
    at, number, cost = rows.c.created_at, 0, 0
    query = select(func.count(), int_sum(rows.c.cost))
    start = (await connection.execute(select(func.min(at)).where(at < before))).scalar_one()
    while start is not None:
        end = start + HOUR if before - start > HOUR else before
        found = (await connection.execute(query.where(at >= start, at < end))).one()
        number, cost = number + found[0], cost + found[1]
        start = (await connection.execute(select(func.min(at)).where(at >= end, at < before))).scalar_one()
    return number, cost


async def patiently(work: Callable[[], Awaitable[T]], tries: int) -> T:
    """Return the result of work, repeated while it is Unavailable."""
    for left in reversed(range(tries)):
        try:
            return await work()
        except Unavailable:
            if left == 0:
                raise
            await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError("unreachable")


async def make_month(connection: AsyncConnection, month: date) -> bool:
    """Make a month's partition, and move its rows there from the default one. Returns False if it is not needed.

    connection: one of `changing_partitions`.
    """
    since, until, name = first_id(month), first_id(next_month(month)), f"usage_{month:%Y%m}"
    found = await read_partitions(connection)
    first = next((each.until for each in found if each.name == FIRST), None)
    if name in {each.name for each in found} or (first is not None and first > since):
        return False
    await connection.execute(text(f"LOCK TABLE {DEFAULT} IN ACCESS EXCLUSIVE MODE"))
    inside = f"request_id >= '{since}' AND request_id < '{until}'"
    some = text(f"SELECT count(*) FROM (SELECT 1 FROM {DEFAULT} WHERE {inside} LIMIT {MOVED + 1}) AS found")
    if (await connection.execute(some)).scalar_one() > MOVED:
        log.warning("%s has more than %d rows of %s, which stay there", DEFAULT, MOVED, f"{month:%Y-%m}")
        return False
    statements = (
        f"CREATE TABLE {name} (LIKE usage INCLUDING DEFAULTS)",
        f"WITH moved AS (DELETE FROM {DEFAULT} WHERE {inside} RETURNING *) INSERT INTO {name} SELECT * FROM moved",
        f"ALTER TABLE usage ATTACH PARTITION {name} FOR VALUES FROM ('{since}') TO ('{until}')",
    )
    for statement in statements:
        await connection.execute(text(statement))
    log.info("partition %s of usage is made", name)
    return True


async def make_months(connection: AsyncConnection, ids: Iterable[str]) -> None:
    """Make the partitions of the months of ids.

    connection: one of `changing_partitions`, or of another transaction that excludes changes of partitions.
    """
    for month in sorted({month for each in ids if (month := month_of(each)) is not None}):
        await make_month(connection, month)


async def _is_old(connection: AsyncConnection, each: Partition, before: datetime) -> bool:
    """Return whether a partition has only rows before a given time, and will get no others from gateways' clocks."""
    if each.until is None or each.until > first_id(before):
        return False
    query = text(f"SELECT max(created_at) < :before FROM {each.name}")
    newest_is_old = (await connection.execute(query, {"before": before})).scalar_one()
    # Without any row the first partition stays for random ids; a past month is of no further use.
    return each.name != FIRST if newest_is_old is None else bool(newest_is_old)


def _detached_name(name: str) -> str:
    """Return a new name, which no later partition of the same month can have."""
    return f"{DETACHED}{name.removeprefix('usage_')}_{datetime.now(UTC):%Y%m%d%H%M%S%f}"


def _usage_as(name: str) -> Table:
    """Return the table of usage rows under another name."""
    return usage.to_metadata(MetaData(), name=name)
