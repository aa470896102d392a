"""Hourly chores of a process whose clock is wrong."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from gateway.billing.writer import UsageWriter
from gateway.records import housekeeping, retention
from gateway.records.database import Database
from gateway.records.housekeeping import TURN, Housekeeping
from gateway.records.retention import Retention
from gateway.records.tables import usage
from gateway.redis.client import Client
from testing.gateway.clocks import clock_ahead
from testing.gateway.rows import row
from testing.gateway.running import until

KEPT = timedelta(days=90)


def set_clock(monkeypatch: pytest.MonkeyPatch, ahead: timedelta) -> None:
    for module in (housekeeping, retention):
        monkeypatch.setattr(module, "datetime", clock_ahead(ahead))


async def test_a_machine_whose_clock_is_ahead_removes_no_usage_row(
    database: Database, redis: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The clock of a machine that was suspended may be years ahead. Another machine then does the chores."""
    now = datetime.now(UTC)
    await UsageWriter(database).write([row(f"r{i}", created_at=now - timedelta(days=40 * i)) for i in range(5)])
    monkeypatch.setattr(housekeeping, "ASK_SECONDS", 0.05)
    await redis.delete(TURN)
    store = Retention(database)
    chores = Housekeeping(redis, 30.0, {"usage rows removed": lambda: store.prune_usage(KEPT)})

    async def left() -> int:
        async with database.read() as connection:
            return int((await connection.execute(select(func.count()).select_from(usage))).scalar_one())

    async def is_refused() -> bool:
        return sum("the clock of this machine is" in record.message for record in caplog.records) >= 2

    async def is_pruned() -> bool:
        return await left() == 3

    set_clock(monkeypatch, timedelta(days=3650))
    task = asyncio.create_task(chores.run())
    try:
        with caplog.at_level(logging.ERROR):
            await until(is_refused)
        assert await left() == 5
        assert "is 87600 h ahead of that of Redis" in caplog.text
        set_clock(monkeypatch, timedelta())
        await until(is_pruned)
    finally:
        task.cancel()
        await asyncio.wait([task])
        await redis.delete(TURN)
