"""Tasks that are cancelled in the middle of a statement on SQLite."""

import asyncio
import gc
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.records.sql.database import STATEMENT_SECONDS, Database

# About 20 ms.
STATEMENT = text(
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) SELECT max(i) FROM n"
)


async def test_tasks_that_are_cancelled_twice_leave_none_behind(tmp_path: Path) -> None:
    """A second cancellation comes while the connection is closed for the first one."""
    database = Database(f"sqlite:///{tmp_path}/gateway.db")

    async def ask() -> None:
        async with database.read() as connection:
            await connection.execute(STATEMENT)

    for turns in range(1, 9):
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.01)
        asking.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking], timeout=10)
        assert asking.done()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, stuck = await asyncio.wait(left, timeout=10)
        assert not stuck
    await ask()
    await database.close()


async def test_a_cancelled_transaction_releases_the_write_lock(tmp_path: Path) -> None:
    """The write lock must not wait for the garbage collection of the cancelled task's statement."""
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    async with database.write() as connection:
        await connection.execute(text("CREATE TABLE numbers (i INTEGER)"))
    is_asking = asyncio.Event()

    async def ask() -> None:
        async with database.write() as connection:
            await connection.execute(text("INSERT INTO numbers VALUES (1)"))
            is_asking.set()
            await connection.execute(STATEMENT)

    errors = []
    gc.disable()
    try:
        for _ in range(4):
            is_asking.clear()
            asking = asyncio.create_task(ask())
            await is_asking.wait()
            await asyncio.sleep(0.005)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError) as error:
                await asking
            errors.append(error)
            started = time.monotonic()
            async with database.write() as connection:
                assert (await connection.execute(text("SELECT count(*) FROM numbers"))).scalar_one() == 0
            assert time.monotonic() - started < STATEMENT_SECONDS / 2
    finally:
        gc.enable()
        await database.close()
