"""Hourly chores of a process whose clock is wrong."""

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from gateway.billing.writer import UsageWriter
from gateway.records.maintenance import housekeeping, retention
from gateway.records.maintenance.housekeeping import Housekeeping
from gateway.records.maintenance.retention import Retention
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage
from gateway.redis.client import Client
from gateway.redis.keys import HOUSEKEEPING_KEY
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
    await redis.delete(HOUSEKEEPING_KEY)
    store = Retention(database)
    chores = Housekeeping(redis, 30.0, {"usage rows removed": lambda: store.prune_usage(KEPT)})

    async def left() -> int:
        async with database.read() as connection:
            return int((await connection.execute(select(func.count()).select_from(usage))).scalar_one())

    def lines() -> list[str]:
        return [record.message for record in caplog.records if "clock of this machine" in record.message]

    async def is_refused() -> bool:
        return bool(lines())

    async def is_pruned() -> bool:
        return await left() == 3

    set_clock(monkeypatch, timedelta(days=3650))
    task = asyncio.create_task(chores.run())
    try:
        with caplog.at_level(logging.WARNING):
            await until(is_refused)
            await asyncio.sleep(0.5)
        assert await left() == 5
        assert "is 87600 h ahead of that of Redis" in caplog.text
        set_clock(monkeypatch, timedelta())
        await until(is_pruned)
        [begun, ended] = lines()
        assert begun.endswith("h ahead of that of Redis; correct one of them")
        assert ended == "housekeeping goes on: the clock of this machine agrees with that of Redis again"
    finally:
        task.cancel()
        await asyncio.wait([task])
        await redis.delete(HOUSEKEEPING_KEY)


async def test_a_clock_that_stays_wrong_is_logged_again_by_one_process(
    redis: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(housekeeping, "ASK_SECONDS", 0.02)
    monkeypatch.setattr(housekeeping, "LOG_SECONDS", 0.3)
    set_clock(monkeypatch, timedelta(hours=-5))
    asked = dict.fromkeys((True, False), 0)

    def process(logs_clock: bool) -> Housekeeping:
        chores = Housekeeping(redis, 30.0, {}, logs_clock=logs_clock)
        is_on_time = chores._is_on_time

        async def count() -> bool:
            asked[logs_clock] += 1
            return await is_on_time()

        monkeypatch.setattr(chores, "_is_on_time", count)
        return chores

    def lines() -> list[str]:
        return [record.message for record in caplog.records if "clock" in record.message]

    async def is_logged_again() -> bool:
        return len(lines()) >= 2 and min(asked.values()) > 6

    begun = time.monotonic()
    tasks = [asyncio.create_task(process(logs_clock).run()) for logs_clock in asked]
    try:
        with caplog.at_level(logging.WARNING):
            await until(is_logged_again)
            found, seconds = lines(), time.monotonic() - begun
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert len(found) <= 1 + seconds / housekeeping.LOG_SECONDS
    assert all("is 5 h behind that of Redis" in line for line in found)
