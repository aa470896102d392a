"""Writers of whole tables into SQLite and PostgreSQL."""

import asyncio
import io
import sqlite3
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import asyncpg
from sqlalchemy import Table

# PostgreSQL's settings while it is filled: it must survive no crash, since the data would be made again.
HASTE = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_wal_size": "'8GB'",
    "checkpoint_timeout": "'1h'",
    "autovacuum": "off",
    "maintenance_work_mem": "'1GB'",
    "work_mem": "'256MB'",
    "jit": "off",
}
# Longest wait for SQLite's lock.
LOCK_SECONDS = 30.0


class Filler(Protocol):
    """Writer of whole tables."""

    @staticmethod
    def encode(rows: Sequence[tuple[Any, ...]]) -> Any:
        """Return rows in the form for `write_encoded`. Their values are in the order of the table's columns."""

    def start_of(self, period: str, column: str) -> str:
        """Return the SQL of the start of the "hour" or "day" of a time."""

    async def begin(self) -> None:
        """Prepare the database for much writing."""

    async def write_encoded(self, table: Table, encoded: Any) -> None: ...

    async def write(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None: ...

    async def execute(self, statement: str) -> None: ...

    async def execute_beside(self, *chains: Sequence[str]) -> None:
        """Execute chains of statements, beside each other where the database can."""

    async def drop_indexes(self, *tables: Table) -> list[str]:
        """Drop all indexes but those of keys. Returns the statements that create them again."""

    async def settle(self) -> None:
        """Make what is written so far visible to others, with the statistics that their queries need."""

    async def close(self) -> None: ...


class OnSqlite:
    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=0, isolation_level=None)
        self._connection.execute("PRAGMA synchronous=OFF")

    @staticmethod
    def encode(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [tuple(_as_text(value) for value in row) for row in rows]

    def start_of(self, period: str, column: str) -> str:
        return f"strftime('%Y-%m-%d {'%H' if period == 'hour' else '00'}:00:00.000000', substr({column}, 1, 19))"

    async def begin(self) -> None:
        self._connection.execute("PRAGMA cache_size=-500000")

    async def write_encoded(self, table: Table, encoded: list[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(table.c))
        names = ", ".join(table.c.keys())
        await self._hold()
        self._connection.executemany(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", encoded)

    async def write(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        await self.write_encoded(table, self.encode(rows))

    async def execute(self, statement: str) -> None:
        await self._hold()
        self._connection.execute(statement)

    async def execute_beside(self, *chains: Sequence[str]) -> None:
        for chain in chains:
            for statement in chain:
                await self.execute(statement)

    async def drop_indexes(self, *tables: Table) -> list[str]:
        await self._hold()
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL"
        found = [row for table in tables for row in self._connection.execute(query, (table.name,))]
        for name, _ in found:
            self._connection.execute(f"DROP INDEX {name}")
        return [statement for _, statement in found]

    async def settle(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")

    async def close(self) -> None:
        await self.settle()
        self._connection.close()

    async def _hold(self) -> None:
        """Begin a transaction. A gateway of this process may hold the lock, and must be able to end its own meanwhile.

        Raises TimeoutError.
        """
        async with asyncio.timeout(LOCK_SECONDS):
            while not self._connection.in_transaction:
                try:
                    self._connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    await asyncio.sleep(0.01)


class OnPostgresql:
    """Writer through a connection. others: further ones, for statements beside each other."""

    def __init__(self, connection: asyncpg.Connection, *others: asyncpg.Connection) -> None:
        self._connection = connection
        self._all = (connection, *others)
        self._is_hasty = False

    @staticmethod
    def encode(rows: Sequence[tuple[Any, ...]]) -> bytes:
        """Return the text of COPY: much faster to make than the driver's binary form of the same values."""
        return "".join(["\t".join([_as_copy(value) for value in row]) + "\n" for row in rows]).encode()

    def start_of(self, period: str, column: str) -> str:
        return f"date_trunc('{period}', {column}, 'UTC')"

    async def begin(self) -> None:
        """Set HASTE until `close`, for all connections."""
        self._is_hasty = True
        await self._configure(f"SET {name} = {value}" for name, value in HASTE.items())

    async def write_encoded(self, table: Table, encoded: bytes) -> None:
        await self._connection.copy_to_table(table.name, source=io.BytesIO(encoded), columns=table.c.keys())

    async def write(self, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
        await self.write_encoded(table, self.encode(rows))

    async def execute(self, statement: str) -> None:
        await self._connection.execute(statement)

    async def execute_beside(self, *chains: Sequence[str]) -> None:
        left = list(chains)

        async def execute(connection: asyncpg.Connection) -> None:
            while left:
                for statement in left.pop(0):
                    await connection.execute(statement)

        await asyncio.gather(*map(execute, self._all))

    async def drop_indexes(self, *tables: Table) -> list[str]:
        query = (
            "SELECT CAST(CAST(indexrelid AS regclass) AS text) AS name, pg_get_indexdef(indexrelid) AS statement "
            "FROM pg_index WHERE indrelid = ANY(CAST($1 AS text[])::regclass[]) AND NOT EXISTS "
            "(SELECT FROM pg_constraint WHERE conindid = indexrelid) ORDER BY indrelid, indexrelid"
        )
        found = await self._connection.fetch(query, [table.name for table in tables])
        for row in found:
            await self._connection.execute(f"DROP INDEX {row['name']}")
        return [row["statement"] for row in found]

    async def settle(self) -> None:
        await self._connection.execute("ANALYZE")

    async def close(self) -> None:
        if self._is_hasty:
            await self._configure(f"RESET {name}" for name in HASTE)
        await self._connection.execute("CHECKPOINT")
        await self._connection.execute("VACUUM ANALYZE")
        for connection in self._all:
            await connection.close()

    async def _configure(self, changes: Any) -> None:
        for change in changes:
            await self._connection.execute(f"ALTER SYSTEM {change}")
        await self._connection.execute("SELECT pg_reload_conf()")


def _as_text(value: Any) -> Any:
    return value.strftime("%Y-%m-%d %H:%M:%S.%f") if isinstance(value, datetime) else value


def _as_copy(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("\\", "\\\\")
    if isinstance(value, datetime):
        return value.isoformat()
    return "\\N" if value is None else str(value)
