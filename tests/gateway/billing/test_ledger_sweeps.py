"""Sweeps over many tenants: one process sweeps, all learn its result, and idle tenants are dropped."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.billing import ledger as ledger_module
from gateway.billing.journal import Journal
from gateway.billing.ledger import Ledger
from gateway.billing.stream import UsageStream
from gateway.billing.writer import UsageWriter
from gateway.quota.quota import Quota
from gateway.records.sql.database import Database
from gateway.redis import sweeps
from gateway.redis.keys import (
    REGISTERED_TENANTS_BEFORE_KEY,
    REGISTERED_TENANTS_KEY,
    USAGE_SWEEPER_KEY,
    leases_key,
    usage_key,
)
from gateway.usage_row import encode
from testing.gateway.principals import principal
from testing.gateway.quotas import settle, take
from testing.gateway.rows import row


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a turn to sweep outlast a stall of this process."""
    monkeypatch.setattr(ledger_module, "SWEEP_SECONDS", 600.0)


@pytest.fixture
def ledgers(database: Database, redis: Redis, tmp_path: Path) -> list[Ledger]:
    """Start the ledgers of eight gateways."""
    writer, stream = UsageWriter(database), UsageStream(redis, 30.0)
    return [Ledger(writer, stream, Journal(tmp_path / str(i), 10**6), 100) for i in range(8)]


async def add_tenants(redis: Redis, count: int) -> list[str]:
    ids = [f"t{i}" for i in range(count)]
    for start in range(0, count, sweeps.PAGE):
        await sweeps.register(redis, ids[start : start + sweeps.PAGE])
    return ids


async def make_old(redis: Redis, *tenant_ids: str) -> None:
    """Set these registrations to before the retention time of an idle tenant."""
    long_ago = (time.time() - sweeps.IDLE_SECONDS - 60) * 1000
    await redis.zadd(REGISTERED_TENANTS_KEY, dict.fromkeys(tenant_ids, int(long_ago)))


async def registered(redis: Redis) -> set[str]:
    return {tenant_id.decode() for tenant_id in await redis.zrange(REGISTERED_TENANTS_KEY, 0, -1)}


async def survey(stream: UsageStream) -> dict[str, int]:
    return {tenant_id: length async for page in stream.lengths() for tenant_id, length in page.items()}


async def calls(redis: Redis) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): of["calls"] for name, of in (await redis.info("commandstats")).items()}


async def test_of_eight_gateways_one_counts_a_thousand_tenants(redis: Redis, ledgers: list[Ledger]):
    ids = await add_tenants(redis, 1000)
    for number in range(120):
        await redis.xadd(usage_key(ids[number]), {"event": encode(row(f"r{number}", tenant_id=ids[number]))})
    before = await calls(redis)
    await asyncio.gather(*(ledger._sweep() for ledger in ledgers))
    after = await calls(redis)
    made = {name: after[name] - before.get(name, 0) for name in after if name != "info"}
    # Streams with entries are checked twice; no count grows with gateways times tenants.
    assert made["xlen"] == 1000
    assert made["xrange"] == 120
    assert sum(made.values()) < 1000 + 4 * 120 + 8 * 10
    # Every gateway learns the backlog, which exceeds the limit of its rows.
    for ledger in ledgers:
        await ledger._sweep()
    assert [ledger.waiting for ledger in ledgers] == [120] * 8
    assert not any(ledger.has_room for ledger in ledgers)


async def test_pages_are_counted_under_deadlines_of_their_own(redis: Redis):
    ids = await add_tenants(redis, 2003)
    await redis.xadd(usage_key(ids[-1]), {"event": b"x"})
    stream, longest = UsageStream(redis, 30.0), 0
    sent = redis.pipeline

    def counting(**options: Any) -> Any:
        pipeline = sent(**options)
        execute = pipeline.execute

        async def measured(**how: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(pipeline))
            return await execute(**how)

        pipeline.execute = measured
        return pipeline

    redis.pipeline = counting  # type: ignore[method-assign]
    assert await survey(stream) == {ids[-1]: 1}
    assert await stream.tenants() == sorted(ids)
    # Redis' pages have about the requested size.
    assert 0 < longest <= 2 * sweeps.PAGE


async def test_a_tenant_is_forgotten_once_it_is_idle_and_has_nothing(redis: Redis):
    ids = await add_tenants(redis, 6)
    fresh, idle, leased, filled, broken, again = ids
    await redis.zadd(leases_key(leased), {"r": -5})
    await redis.xadd(usage_key(filled), {"event": b"x"})
    await redis.set(usage_key(broken), "not of this kind")
    await make_old(redis, idle, leased, filled, broken)
    stream = UsageStream(redis, 30.0)
    assert await survey(stream) == {filled: 1}
    assert await registered(redis) == {fresh, leased, filled, broken, again}
    await redis.delete(leases_key(leased), usage_key(filled))
    await survey(stream)
    assert await registered(redis) == {fresh, broken, again}


async def test_a_tenant_that_registers_while_it_is_looked_at_stays(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    """A tenant takes a lease after the sweep has found none, and stays registered."""
    await make_old(redis, "t")
    remove = sweeps.remove

    async def late(*arguments: Any) -> int:
        await sweeps.register(redis, ["t"])
        await redis.zadd(leases_key("t"), {"r": 5})
        return await remove(*arguments)

    monkeypatch.setattr(sweeps, "remove", late)
    await survey(UsageStream(redis, 30.0))
    assert await registered(redis) == {"t"}


async def test_a_request_that_is_settled_between_the_two_looks_is_not_lost(redis: Redis):
    """Leases are counted before streams: if a settled request has no lease, its event is already in the stream."""
    who = principal(tenant={"max_concurrent": 1})
    quota, asked = Quota(redis, 30.0, 600), []
    running = await take(quota, who)
    await make_old(redis, who.tenant.id)
    sent = redis.pipeline

    def recording(**options: Any) -> Any:
        pipeline = sent(**options)
        execute = pipeline.execute_command
        pipeline.execute_command = lambda *command, **how: (asked.append(command[0]), execute(*command, **how))[1]
        return pipeline

    redis.pipeline = recording  # type: ignore[method-assign]
    await survey(UsageStream(redis, 30.0))
    assert asked == ["ZCARD", "XLEN"]
    await settle(quota, running, 1)
    assert await survey(UsageStream(redis, 30.0)) == {who.tenant.id: 1}
    assert await registered(redis) == {who.tenant.id}
    await quota.close()


async def test_a_gateway_registers_a_tenant_again_while_it_is_in_use(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    who, quota = principal(), Quota(redis, 30.0, 600)
    await take(quota, who)
    await redis.delete(REGISTERED_TENANTS_KEY)
    await take(quota, who)
    assert await registered(redis) == set()
    monkeypatch.setattr(sweeps, "REGISTER_SECONDS", 0.0)
    await take(quota, who)
    assert await registered(redis) == {who.tenant.id}
    # Registrations from before the outage of Redis do not count.
    monkeypatch.setattr(sweeps, "REGISTER_SECONDS", 60.0)
    await redis.delete(REGISTERED_TENANTS_KEY)
    quota._store._answers_since = time.monotonic()
    await take(quota, who)
    assert await registered(redis) == {who.tenant.id}
    await quota.close()


async def test_a_process_remembers_no_registration_that_is_over(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    of = sweeps.Registrations(redis)
    await of.add(["a", "b"])
    monkeypatch.setattr(sweeps, "REGISTER_SECONDS", 0.0)
    await asyncio.sleep(0.01)
    await of.add(["c"])
    assert set(of._since) == {"c"}


async def test_tenants_of_the_release_before_are_taken_over(
    redis: Redis, ledgers: list[Ledger], database: Database, monkeypatch: pytest.MonkeyPatch
):
    """Gateways of the previous release register a tenant once: it is kept for longer, and its usage is written."""
    monkeypatch.setattr(ledger_module, "LEFT_BEHIND_SECONDS", 0.0)
    ids = [f"t{i}" for i in range(sweeps.PAGE + 20)]
    await redis.sadd(REGISTERED_TENANTS_BEFORE_KEY, *ids)
    await redis.xadd(usage_key(ids[7]), {"event": encode(row("r", tenant_id=ids[7]))}, id="1-1")
    await ledgers[0]._sweep()
    assert await registered(redis) == set(ids)
    assert not await redis.exists(REGISTERED_TENANTS_BEFORE_KEY)
    assert await redis.zscore(REGISTERED_TENANTS_KEY, ids[0]) > (time.time() + sweeps.BEFORE_SECONDS / 2) * 1000
    assert await redis.xlen(usage_key(ids[7])) == 0
    # A gateway of this release registers it, and does not shorten its time.
    await sweeps.register(redis, [ids[0]])
    assert await redis.zscore(REGISTERED_TENANTS_KEY, ids[0]) > (time.time() + sweeps.BEFORE_SECONDS / 2) * 1000


async def test_another_gateway_sweeps_once_the_one_that_did_is_gone(redis: Redis, ledgers: list[Ledger]):
    assert await ledgers[0]._sweep() is True
    assert await ledgers[1]._sweep() is False
    assert 0 < await redis.pttl(USAGE_SWEEPER_KEY) <= ledger_module.SWEEP_SECONDS * 1000
    await redis.delete(USAGE_SWEEPER_KEY)
    assert await ledgers[1]._sweep() is True
