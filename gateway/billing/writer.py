"""Writer of usage rows into SQL: each row once, with the sums of its hour and day in the same transaction.

Any number of processes may write at once. All transactions lock in the same order (rows by request id, then hours, then
days, then the sums by end user and for charts and numbers of failures, each by its key), so that they cannot deadlock.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Executable, Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.billing.activity_writer import ActivityWriter
from gateway.billing.end_user_writer import EndUserWriter
from gateway.error_codes import DATABASE_UNAVAILABLE
from gateway.errors import Unavailable
from gateway.records.requests.refusal_tables import refusal_counts
from gateway.records.requests.refused import MINUTE, Counted, sums_of
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage, usage_daily, usage_hourly, usage_rejected
from gateway.sql_states import CHECK_VIOLATION, is_datas_fault, sql_state
from gateway.usage_row import UsageRow, decode, encode

log = logging.getLogger(__name__)

SUMMED = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "cost", "surcharge")


class UsageWriter:
    """Writer of usage rows. rejected: the number of events that this process has set aside in `usage_rejected`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = {"sqlite": sqlite, "postgresql": postgresql}[database.dialect]
        self._upserts = {table: self._adding(table) for table in (usage_hourly, usage_daily)}
        self._count_failures = self._adding(refusal_counts, ("requests",))
        self._activity = ActivityWriter(database.dialect)
        self._end_users = EndUserWriter(database.dialect)
        self.rejected = 0

    async def write_events(self, events: Iterable[bytes]) -> None:
        """Write encoded rows as `write` does. Events that are not usage rows are set aside."""
        rows = []
        for event in events:
            try:
                rows.append(decode(event))
            except ValueError as error:
                await self._reject(event, f"not a usage row: {error}")
        await self.write(rows)

    async def write(self, rows: Iterable[UsageRow]) -> None:
        """Write rows; those that the database refuses are set aside. Raises Unavailable, perhaps after some rows."""
        by_id = {row.request_id: row for row in reversed(list(rows))}
        await self._write([by_id[request_id] for request_id in sorted(by_id)])

    async def _write(self, rows: Sequence[UsageRow], *, is_second: bool = False) -> None:
        """Write rows in one transaction. If it is refused, bisect them, so that only the bad row is set aside.

        is_second: whether a single row is written again after a CHECK_VIOLATION. PostgreSQL raises it also if a month's
        partition is attached while an insert into the default partition waits; the second insert finds the new one.
        """
        if not rows:
            return
        try:
            async with self._database.write() as connection:
                new = await self._insert(connection, rows)
                for table, period in ((usage_hourly, "hour"), (usage_daily, "day")):
                    if new:
                        await connection.execute(self._upserts[table], sums_by(new, period))
                if new:
                    await self._end_users.add(connection, new)
                    await self._activity.add(connection, new)
                if failed := failures_of(new):
                    await connection.execute(self._count_failures, failed)
        except BaseException as error:
            self._activity.forget()
            if not isinstance(error, DBAPIError | OverflowError):
                raise
            if isinstance(error, DBAPIError) and not is_datas_fault(error):
                log.error("the database refuses usage rows", exc_info=error)
                raise Unavailable("The database cannot take usage rows.", code=DATABASE_UNAVAILABLE) from error
            if len(rows) == 1:
                if sql_state(error) == CHECK_VIOLATION and not is_second:
                    await self._write(rows, is_second=True)
                    return
                await self._reject(encode(rows[0]), f"{type(error).__name__}: {getattr(error, 'orig', error)}")
                return
            middle = len(rows) // 2
            await self._write(rows[:middle])
            await self._write(rows[middle:])

    async def _insert(self, connection: AsyncConnection, rows: Sequence[UsageRow]) -> list[UsageRow]:
        """Insert rows and return those that were not in the table yet."""
        if self._database.dialect == "postgresql":
            found = await connection.execute(INSERT_ON_POSTGRESQL, {"rows": msgspec.json.encode(rows).decode()})
        else:
            insert = sqlite.insert(usage).on_conflict_do_nothing().returning(usage.c.request_id)
            found = await connection.execute(insert, [msgspec.structs.asdict(row) for row in rows])
        new = set(found.scalars())
        return [row for row in rows if row.request_id in new]

    def _adding(self, table: Table, names: Sequence[str] = SUMMED) -> Executable:
        insert = self._dialect.insert(table)
        return insert.on_conflict_do_update(
            index_elements=list(table.primary_key.columns),
            set_={name: table.c[name] + insert.excluded[name] for name in names},
        )

    async def _reject(self, event: bytes, reason: str) -> None:
        """Set an event aside. Raises Unavailable."""
        # PostgreSQL's text cannot contain a NUL, and an event may not be UTF-8.
        shown = event.decode("utf-8", "backslashreplace").replace("\0", "\\0")
        values = {
            "id": hashlib.sha256(event).hexdigest(),
            "reason": reason.replace("\0", "\\0")[:2000],
            "event": shown,
            "rejected_at": datetime.now(UTC),
        }
        insert = self._dialect.insert(usage_rejected).values(values).on_conflict_do_nothing()
        async with self._database.write() as connection:
            await connection.execute(insert)
        self.rejected += 1
        log.critical("usage event moved to usage_rejected as %s: %s", values["id"], reason)


def failures_of(rows: Iterable[UsageRow]) -> list[dict[str, Any]]:
    """Return the rows of `refusal_counts` to add for requests that failed after their admission."""
    counts = Counter(
        Counted(
            int(row.created_at.timestamp()) // MINUTE * MINUTE,
            row.tenant_id,
            row.error_code,
            0,
            row.limit_name or "",
            row.tenant,
        )
        for row in rows
        if row.error_code is not None
    )
    return sums_of(counts)


def sums_by(rows: Iterable[UsageRow], period: str) -> list[dict[str, Any]]:
    """Return the sums of each tenant, period, key and model, in the order of the sums' primary key."""
    sums: dict[tuple[str, datetime, str, str], dict[str, Any]] = {}
    for row in rows:
        start = row.created_at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        if period == "day":
            start = start.replace(hour=0)
        key = (row.tenant_id, start, row.key_id, row.model)
        entry = sums.get(key)
        if entry is None:
            names = ("tenant_id", period, "key_id", "model")
            entry = sums[key] = {**dict(zip(names, key, strict=True)), "tenant": row.tenant, **dict.fromkeys(SUMMED, 0)}
        entry["requests"] += 1
        for name in SUMMED[1:]:
            entry[name] += getattr(row, name)
    return [sums[key] for key in sorted(sums)]


def _insert_on_postgresql() -> Executable:
    """Return the insert statement. It has one parameter for all rows, so that the server prepares it only once."""
    dialect = postgresql.dialect()
    names = ", ".join(usage.c.keys())
    columns = ", ".join(f"{column.name} {column.type.compile(dialect)}" for column in usage.c)
    return text(
        f"INSERT INTO usage ({names}) SELECT {names} FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS row({columns}) "
        "ORDER BY request_id ON CONFLICT (request_id) DO NOTHING RETURNING request_id"
    )


INSERT_ON_POSTGRESQL = _insert_on_postgresql()
