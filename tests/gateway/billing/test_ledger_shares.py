"""Usage rows that wait for the database: one tenant's rows never use up the other tenants' room."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from gateway.billing import ledger as ledger_module
from gateway.billing import stream as stream_module
from gateway.billing.journal import Journal
from gateway.billing.ledger import Ledger
from gateway.billing.stream import UsageStream
from gateway.errors import Unavailable
from gateway.records.sql.database import Database
from gateway.redis.keys import USAGE_BACKLOG_OF_TENANTS_KEY, usage_key
from gateway.redis.sweeps import register
from gateway.usage_row import encode
from testing.gateway.rows import row
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream

MAX_ROWS = 100


class Writer:
    """Writer of a database that is away while `is_away`."""

    is_away = True

    async def write(self, rows: Iterable[Any]) -> None:
        list(rows)
        if self.is_away:
            raise Unavailable("The database is away.", code="database_unavailable")

    write_events = write


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def ledgers(redis: Redis, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Ledger]:
    """Return the ledgers of two gateways. The first one that sweeps has the turn."""
    monkeypatch.setattr(ledger_module, "SWEEP_SECONDS", 600.0)
    monkeypatch.setattr(ledger_module, "LEFT_BEHIND_SECONDS", 0.0)
    stream = UsageStream(redis, 30.0)
    return [Ledger(writer, stream, Journal(tmp_path / str(i), 10**6), MAX_ROWS) for i in range(2)]  # type: ignore[arg-type]


async def add(redis: Redis, tenant_id: str, count: int) -> None:
    await register(redis, [tenant_id])
    for number in range(count):
        event = encode(row(f"{tenant_id}-{number}", tenant_id=tenant_id))
        await redis.xadd(usage_key(tenant_id), {"event": event}, id=f"1-{number + 1}")


async def survey(ledgers: list[Ledger], redis: Redis) -> None:
    """Let the first ledger count all streams, and the second read the result."""
    await redis.delete("loraplex:usage:sweeper")
    with contextlib.suppress(Unavailable):
        await ledgers[0]._sweep()
    await ledgers[1]._sweep()


def admitted(ledgers: list[Ledger]) -> list[set[str]]:
    """Return the tenants that each ledger has room for."""
    return [{name for name in ("greedy", "a", "b") if ledger.has_room_for(name)} for ledger in ledgers]


async def test_while_sql_is_away_a_tenant_fills_half_of_the_queue_and_the_next_one_half_of_the_rest(
    redis: Redis, ledgers: list[Ledger], writer: Writer
):
    await add(redis, "greedy", MAX_ROWS // 2 - 1)
    await survey(ledgers, redis)
    assert admitted(ledgers) == [{"greedy", "a", "b"}] * 2
    await redis.delete(usage_key("greedy"))
    await add(redis, "greedy", MAX_ROWS // 2)
    await survey(ledgers, redis)
    assert admitted(ledgers) == [{"a", "b"}] * 2
    await add(redis, "a", MAX_ROWS // 4)
    await survey(ledgers, redis)
    assert admitted(ledgers) == [{"b"}] * 2
    await add(redis, "b", MAX_ROWS // 4)
    await survey(ledgers, redis)
    assert admitted(ledgers) == [set(), set()]
    assert [ledger.waiting for ledger in ledgers] == [MAX_ROWS] * 2
    writer.is_away = False
    await survey(ledgers, redis)
    assert admitted(ledgers) == [{"greedy", "a", "b"}] * 2


async def test_rows_in_memory_count_before_any_sweep(ledgers: list[Ledger], writer: Writer, redis: Redis):
    ledger = ledgers[0]
    for number in range(MAX_ROWS // 2):
        assert ledger.has_room_for("greedy")
        ledger.settled(b"1-1", row(f"r{number}", tenant_id="greedy"))
    assert admitted([ledger]) == [{"a", "b"}]
    writer.is_away = False
    await ledger._write_held()
    assert admitted([ledger]) == [{"greedy", "a", "b"}]
    assert not ledger._held_of


async def test_the_tenants_with_the_most_rows_are_published(
    redis: Redis, ledgers: list[Ledger], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream_module, "MAX_PUBLISHED", 2)
    for name, count in (("a", 3), ("greedy", 60), ("b", 1)):
        await add(redis, name, count)
    await survey(ledgers, redis)
    assert await UsageStream(redis, 30.0).backlog() == (64, {"greedy": 60, "a": 3})
    # A gateway of the previous release that has the turn publishes no numbers of tenants.
    await redis.delete(USAGE_BACKLOG_OF_TENANTS_KEY)
    await ledgers[1]._sweep()
    assert admitted([ledgers[1]]) == [{"greedy", "a", "b"}]


async def test_a_gateway_refuses_the_tenant_that_fills_the_queue_and_serves_another(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, max_ledger_waiting_rows=12)
    async with running(of) as gateway:
        greedy, other = await gateway.tenant("greedy"), await gateway.tenant("other")
        records = Database(of.database_url)
        async with records.write() as connection:
            await connection.execute(text("SELECT 1"))  # a writer to SQLite blocks other writers
            served = 0

            async def is_refused() -> bool:
                nonlocal served
                answer = await greedy.complete()
                served += answer.status == 200
                return answer.status == 503 and answer.error["code"] == "ledger_unavailable"

            await until(is_refused)
            assert served < 12
            assert (await other.complete()).status == 200
            assert await is_refused()

        async def serves_again() -> bool:
            return (await greedy.complete()).status == 200

        await until(serves_again, 60)
        await records.close()
