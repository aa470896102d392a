"""Tasks that are cancelled in the middle of a statement on SQLite."""

import asyncio
from pathlib import Path

from sqlalchemy import text

from gateway.records.database import Database

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
