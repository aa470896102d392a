"""Connections to SQLite for SQLAlchemy: aiosqlite's, with one call of their thread for each statement.

aiosqlite calls its thread for the cursor, the statement, its rows and the close. Each call hands over the interpreter's
lock twice, which takes up to a millisecond while other threads compute: longer than most statements.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiosqlite

# Rows that are read together with the execution of their statement.
FIRST_ROWS = 500


def connect_sqlite(database: str, *, pragmas: Sequence[str] = (), **options: Any) -> "SqliteConnection":
    """Return a connection that is not open yet. options: the keyword arguments of `sqlite3.connect`."""

    def connect() -> sqlite3.Connection:
        opened = sqlite3.connect(database, factory=_RollingBack, **options)
        for pragma in pragmas:
            opened.execute(f"PRAGMA {pragma}").close()
        return opened

    connection = SqliteConnection(connect, iter_chunk_size=64)
    # An open connection does not keep a process from ending.
    connection._thread.daemon = True
    return connection


class SqliteConnection(aiosqlite.Connection):
    """A connection whose thread is stopped once.

    SQLAlchemy stops the thread when a task is cancelled again while its connection is closed. The close then stopped it
    a second time and waited for ever, which kept the process from ending.

    begins: whether the next statement begins a transaction. A plain BEGIN takes no lock, so it needs no call of its
    own. is_at_rest: whether no statement was sent after the end of the last transaction, so that none has to be ended.
    """

    _stopped: asyncio.Future[Any] | None = None
    begins, is_at_rest = False, True

    def stop(self) -> asyncio.Future[Any] | None:
        if self._running:
            self._stopped = super().stop()
        return self._stopped

    def cursor(self) -> "_Cursor":  # type: ignore[override]
        return _Cursor(self)

    async def commit(self) -> None:
        self.begins = False
        if not self.is_at_rest:
            await super().commit()
            self.is_at_rest = True

    async def rollback(self) -> None:
        self.begins = False
        if not self.is_at_rest:
            await super().rollback()
            self.is_at_rest = True


class _RollingBack(sqlite3.Connection):
    """A connection that ends its transaction when it is closed.

    SQLite keeps a closed connection alive while a statement of it exists, and with it the transaction and the write
    lock. A cancelled task's error refers to its statement, so nobody could write until the next garbage collection.
    """

    _is_closed = False

    def close(self) -> None:
        if not self._is_closed and self.in_transaction:
            self.rollback()
        self._is_closed = True
        super().close()


class _Done(NamedTuple):
    """Result of a statement. left: the driver's cursor if there may be more rows; None if it is closed."""

    left: sqlite3.Cursor | None
    rows: Sequence[Any]
    description: Any
    rowcount: int
    lastrowid: int | None


def _run(connection: sqlite3.Connection, begins: bool, method: str, *arguments: Any) -> _Done:
    """Run a statement and read its first rows, in the connection's thread. method: `execute` or `executemany`.

    begins: whether a transaction begins before it.
    """
    cursor = connection.cursor()
    is_read = False
    try:
        if begins:
            cursor.execute("BEGIN")
        getattr(cursor, method)(*arguments)
        rows = cursor.fetchmany(FIRST_ROWS) if cursor.description else []
        is_read = len(rows) < FIRST_ROWS
        return _Done(None if is_read else cursor, rows, cursor.description, cursor.rowcount, cursor.lastrowid)
    except BaseException:
        is_read = True
        raise
    finally:
        if is_read:
            cursor.close()


class _Cursor:
    """Cursor with the methods of aiosqlite's that SQLAlchemy calls."""

    arraysize = 1

    def __init__(self, connection: SqliteConnection) -> None:
        self._connection = connection
        self._left: sqlite3.Cursor | None = None
        self._rows: deque[Any] = deque()
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None

    async def __aenter__(self) -> "_Cursor":
        return self

    async def execute(self, sql: str, parameters: Any = ()) -> None:
        if sql == "BEGIN":
            self._connection.begins = True
        else:
            await self._call("execute", sql, parameters)

    async def executemany(self, sql: str, parameters: Any) -> None:
        await self._call("executemany", sql, parameters)

    async def fetchone(self) -> Any:
        rows = await self.fetchmany(1)
        return rows[0] if rows else None

    async def fetchmany(self, size: int | None = None) -> list[Any]:
        number = self.arraysize if size is None else size
        if number > len(self._rows):
            await self._read("fetchmany", number - len(self._rows))
        return [self._rows.popleft() for _ in range(min(number, len(self._rows)))]

    async def fetchall(self) -> list[Any]:
        await self._read("fetchall")
        rows = list(self._rows)
        self._rows.clear()
        return rows

    async def close(self) -> None:
        left, self._left = self._left, None
        self._rows.clear()
        if left is not None:
            await self._connection._execute(left.close)

    async def _call(self, method: str, *arguments: Any) -> None:
        await self.close()
        connection = self._connection
        begins, connection.begins, connection.is_at_rest = connection.begins, False, False
        done: _Done = await connection._execute(_run, connection._conn, begins, method, *arguments)
        self._left, rows, self.description, self.rowcount, self.lastrowid = done
        self._rows.extend(rows)

    async def _read(self, method: str, *arguments: Any) -> None:
        """Read more rows, if there may be any."""
        if self._left is not None:
            self._rows.extend(await self._connection._execute(getattr(self._left, method), *arguments))
            self.rowcount = self._left.rowcount
