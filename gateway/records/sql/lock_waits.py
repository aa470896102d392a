"""Transactions that wait for locks for a short time only."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import Unavailable
from gateway.records.sql.database import Database
from gateway.sql_states import LOCK_NOT_AVAILABLE, sql_state


@asynccontextmanager
async def waiting_at_most(
    database: Database, seconds: float, locked: Callable[[], Unavailable]
) -> AsyncIterator[AsyncConnection]:
    """Open a transaction that waits for each lock at most `seconds`. Raises `locked()` if one is not free in time.

    Other transactions queue behind such a wait. SQLite has a single lock, with a time-out of its own.
    """
    async with database.write() as connection:
        try:
            if database.dialect == "postgresql":
                await connection.execute(text(f"SET LOCAL lock_timeout = {int(1000 * seconds)}"))
            yield connection
        except DBAPIError as error:
            if sql_state(error) != LOCK_NOT_AVAILABLE:
                raise
            raise locked() from error
