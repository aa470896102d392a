"""Limit of open connections: idle ones are closed, and new clients always get in."""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.api import unserved_rate
from testing.gateway.clocks import SleepClock
from testing.gateway.running import Client, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.inference.test_time_limits import connect
from tests.gateway.api.requests.test_bodies import answered
from tests.gateway.api.test_unserved_rate import BURST, DELAYED, RATE, flood, metric

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def opened(gateway: Gateway, number: int, client: Client | None = None) -> AsyncIterator[list[Connection]]:
    """Hold open connections, each after one answer to `client` if there is one."""
    held: list[Connection] = []
    try:
        for _ in range(number):
            reader, writer = await connect(gateway)
            held.append((reader, writer))
            if client is not None:
                key = f"Authorization: Bearer {client.key}"
                writer.write(f"GET /v1/models HTTP/1.1\r\nHost: t\r\n{key}\r\n\r\n".encode())
                assert (await answered(reader))[0] == 200
        yield held
    finally:
        for _, writer in held:
            writer.transport.abort()


def is_open(connection: Connection) -> bool:
    return not connection[0].at_eof() and connection[0].exception() is None


def still_open(held: list[Connection]) -> list[bool]:
    return [is_open(connection) for connection in held]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux shows the size of the table")
def test_the_table_of_descriptors_has_room_for_all_connections_from_the_start():
    """The kernel enlarges a full table while `accept` waits, for 7 to 20 ms."""
    lines = (
        "from gateway.process.connections import allow_descriptors",
        "allow_descriptors(5000)",
        "print(open('/proc/self/status').read())",
    )
    status = subprocess.run((sys.executable, "-c", "\n".join(lines)), capture_output=True, text=True, check=True).stdout
    size = re.search(r"FDSize:\s*(\d+)", status)
    assert size is not None
    assert int(size[1]) >= 5000


async def test_connections_without_a_key_have_a_quarter(serve: Any, upstream: Upstream):
    async with serve(max_connections=40) as gateway:
        acme = await gateway.tenant("acme")
        async with opened(gateway, 5, acme) as kept, opened(gateway, 30) as idle:

            async def closed() -> bool:
                return sum(still_open(idle)) <= 10

            await until(closed)
            assert sum(still_open(idle)) >= 9  # one is the operator's own connection, before its first request
            assert all(still_open(kept))
            assert (await acme.complete()).status == 200
            assert await metric(gateway, "loraplex_gateway_connections_closed_total") >= 20


async def test_a_tenant_has_half_and_its_oldest_give_way(serve: Any, upstream: Upstream):
    async with serve(max_connections=40) as gateway:
        acme, mallory = await gateway.tenant("acme"), await gateway.tenant("mallory")
        holding = opened(gateway, 5, acme), opened(gateway, 19, mallory), opened(gateway, 6, mallory)
        async with holding[0] as kept, holding[1] as first, holding[2] as last:

            async def closed() -> bool:
                return sum(still_open(first)) <= 14

            await until(closed)
            assert not any(still_open(first)[:5])
            assert all(still_open(last))
            assert all(still_open(kept))


async def test_streams_outlive_idle_connections(serve: Any, upstream: Upstream):
    async with serve(max_connections=40) as gateway:
        mallory = await gateway.tenant("mallory")
        answers = [asyncio.ensure_future(mallory.complete(x_engine={"delay": 0.5})) for _ in range(4)]
        await asyncio.sleep(0.3)
        async with opened(gateway, 30, mallory) as idle:
            assert [(await answer).status for answer in answers] == [200] * 4

            async def closed() -> bool:
                return sum(still_open(idle)) <= 20

            await until(closed)


async def test_requests_of_clients_that_left_with_an_unread_body_end_at_once(
    serve: Any, monkeypatch: pytest.MonkeyPatch
):
    """They wait for their key's rate of unserved requests, here without end, and nothing reads their connections."""
    SleepClock().put(monkeypatch, unserved_rate)
    async with serve(unserved_per_second=RATE) as gateway:
        acme = await gateway.tenant("acme")
        # Larger than aiohttp's buffer, and no larger than the sockets': the end of a connection follows its data.
        body = b"x" * 100_000
        head = f"POST /v1/adapters HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {acme.key}\r\n"
        await flood(acme, "/v1/models", BURST + 40)
        held = [await connect(gateway) for _ in range(20)]
        for _, writer in held:
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

        async def waiting() -> bool:
            return await metric(gateway, DELAYED) == 20

        await until(waiting)
        before = await metric(gateway, "loraplex_gateway_connections")
        for _, writer in held:
            writer.transport.abort()

        async def ended() -> bool:
            return await metric(gateway, "loraplex_gateway_connections") <= before - 20

        await until(ended)
