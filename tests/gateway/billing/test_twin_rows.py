"""Twin rows: a request can have two rows of different moments, and the ledger keeps one, on both forms of the table."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest
from sqlalchemy import select

from gateway.billing.writer import UsageWriter
from gateway.quota.demand import RequestSize
from gateway.quota.fallback import parse_fallback
from gateway.quota.quota import Quota
from gateway.quota.reservation import ExpiredLease
from gateway.records.partitions.partitioning import partition
from gateway.records.partitions.request_ids import RequestIds
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage
from gateway.redis.client import connect
from testing.gateway.principals import principal
from testing.gateway.rows import row
from testing.gateway.running import until


class Deaf:
    """Connections to Redis whose answers can be lost. is_deaf: whether they are."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._serving: set[asyncio.Task[None]] = set()
        self.is_deaf = False

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yield the URL of the connections."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.ensure_future(self._copy_both(reader, writer)))

    async def _copy_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        of = urlsplit(self._url)
        answers, there = await asyncio.open_connection(of.hostname, of.port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, *, may_lose: bool) -> None:
            with suppress(ConnectionError):
                while data := await source.read(65536):
                    if not (may_lose and self.is_deaf):
                        target.write(data)
            target.close()
            with suppress(ConnectionError):
                await target.wait_closed()

        await asyncio.gather(copy(reader, there, may_lose=False), copy(answers, writer, may_lose=True))


@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
async def test_a_request_whose_reservation_was_not_answered(
    partitioned: bool, redis_url: str, migrated_postgres_url: str
):
    database, deaf = Database(migrated_postgres_url), Deaf(redis_url)
    if partitioned:
        await partition(database, lambda line: None)
    ids = RequestIds(database)
    await ids.look()
    who, size, request_id = principal(tenant={"max_concurrent": 5}), RequestSize(0, 1), ids.new()
    assert request_id.startswith("req_g") == partitioned
    async with deaf.listening() as url:
        clients = [connect(url, 5.0), connect(redis_url, 30.0)]
        own, other = Quota(clients[0], 2.0, 1, parse_fallback(["open"])), Quota(clients[1], 30.0, 1)
        await own.release(await own.acquire(who, "base", ids.new(), size))
        deaf.is_deaf = True
        reservation = await own.acquire(who, "base", request_id, size)
        expired: list[ExpiredLease] = []

        async def has_ended() -> bool:
            expired[:] = await other.expired(who.tenant.id)
            return bool(expired)

        await until(has_ended)
        for quota in (own, other):
            await quota.close()
        for client in clients:
            await client.aclose()
    [lease] = expired
    assert lease.reservation.request_id == reservation.request_id == request_id
    assert lease.reservation.admitted_at != reservation.admitted_at
    rows = [row(request_id, created_at=each.admitted_at) for each in (reservation, lease.reservation)]
    await asyncio.gather(*(UsageWriter(database).write([each]) for each in rows))
    async with database.read() as connection:
        [kept] = (await connection.execute(select(usage.c.created_at))).scalars()
    assert kept in {each.created_at for each in rows}
    await database.close()
