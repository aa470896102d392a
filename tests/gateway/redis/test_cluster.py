"""A killed node of the Redis cluster: its replica takes over, and no lease or usage event is lost."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, select

from gateway.billing import ledger as ledger_module
from gateway.billing.journal import Journal
from gateway.billing.ledger import Ledger
from gateway.billing.stream import UsageStream
from gateway.billing.writer import UsageWriter
from gateway.errors import Unavailable
from gateway.quota.demand import RequestSize
from gateway.quota.quota import Quota
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage
from gateway.redis.client import Client, connect
from gateway.redis.keys import usage_key
from gateway.redis.sweeps import register
from gateway.usage_row import encode
from testing.gateway.cluster import Cluster, valkey_cluster
from testing.gateway.principals import principal
from testing.gateway.rows import row
from testing.gateway.running import until

NUM_TENANTS, EACH = 12, 30
# Time to detect a dead node, elect a replica, and inform a client.
PATIENCE = 90.0


@pytest.fixture
def cluster(starts_servers: None, tmp_path: Path) -> Iterator[Cluster]:
    with valkey_cluster(tmp_path, replica=True) as cluster:
        yield cluster


@pytest.fixture
async def redis(cluster: Cluster) -> AsyncIterator[Client]:
    redis = connect(cluster.url, timeout=5.0)
    yield redis
    await redis.aclose()


async def test_a_killed_node_loses_no_event_and_no_lease(
    cluster: Cluster, redis: Client, tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ledger_module, "SWEEP_SECONDS", 0.2)
    shutil.copy(migrated, tmp_path / "records.db")
    database = Database(f"sqlite:///{tmp_path}/records.db")
    ids = [uuid.uuid4().hex for _ in range(NUM_TENANTS)]
    for tenant_id in ids:
        await register(redis, [tenant_id])
        for i in range(EACH):
            event = encode(row(f"{tenant_id}-{i}", tenant_id=tenant_id))
            # Old enough to count as left behind.
            await redis.xadd(usage_key(tenant_id), {"event": event}, id=f"1-{i + 1}")
    while not cluster.first_has(usage_key(tenant_id := uuid.uuid4().hex)):
        pass
    quota = Quota(redis, timeout=5.0, lease_seconds=600)
    who = principal(tenant_id=tenant_id, tenant={"max_concurrent": 1})
    running_on = await quota.acquire(who, "base", "a", RequestSize(1, 1))
    cluster.copied()
    cluster.kill_first()

    stream = UsageStream(redis, 5.0)
    ledger = Ledger(UsageWriter(database), stream, Journal(tmp_path / "journal", 10**6), 10**6)
    moving = asyncio.create_task(ledger.run())
    try:
        # Rows that Redis cannot take now go to the journal.
        await ledger.keep(row("kept"))
        await until(lambda: is_count(database, NUM_TENANTS * EACH + 1), PATIENCE)
        await until(lambda: is_empty(stream, ids), PATIENCE)

        async def settled() -> bool:
            try:
                return await quota.settle(running_on, tokens=2, cost=0, event=encode(row("a"))) is not None
            except Unavailable:
                return False

        await until(settled, PATIENCE)
        await quota.acquire(who, "base", "b", RequestSize(1, 1))
    finally:
        moving.cancel()
        await asyncio.wait({moving})
        await ledger.close()
    await quota.close()
    await database.close()


async def is_count(database: Database, expected: int) -> bool:
    async with database.read() as connection:
        return (await connection.execute(select(func.count()).select_from(usage))).scalar_one() == expected


async def is_empty(stream: UsageStream, ids: list[str]) -> bool:
    try:
        return sum([len(page) for tenant_id in ids async for page in stream.left_behind(tenant_id, 0)]) == 0
    except Unavailable:
        return False
