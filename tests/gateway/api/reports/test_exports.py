"""Exports to clients that read slowly or not at all: their place and their connection end in time."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.api.reports import files
from gateway.api.reports.usage_export import EXPORTS
from gateway.billing.writer import UsageWriter
from gateway.records.sql.database import Database
from testing.gateway.rows import row
from testing.gateway.running import ADMIN_KEY, Gateway, until
from tests.gateway.api.conftest import Ask, Reader
from tests.gateway.api.inference.test_delivery import metric
from tests.gateway.api.inference.test_time_limits import connect

# The whole files have more than 5 MB, and the system's buffers of a connection up to 4 MB.
ROWS = 9000
# Rows whose files exceed 0.8 MB, enough to fill the buffers with the fixture `small_send_buffers`.
FEW_ROWS = 1500
LOG = "/admin/requests?format=json"
NOW = datetime.now(UTC)
USAGE = f"/admin/api/usage/export?format=json&group_by=model,key,end_user,hour&since={NOW - timedelta(days=2):%F}"
SMALL = {"reader_buffer_bytes": 2**16}


@pytest.fixture
async def database(tmp_path: Path, starts_servers: None) -> AsyncIterator[Database]:
    """Return the gateway's database, for rows of usage."""
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    yield database
    await database.close()


async def fill(database: Database, rows: int) -> None:
    await UsageWriter(database).write(
        row(f"req_{i:05}", created_at=NOW, end_user=f"{i:0128}", model="m" * 250) for i in range(rows)
    )


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Send the request for an export and read nothing; closes all connections at the end."""
    made: list[Reader] = []

    async def send(gateway: Gateway, path: str) -> Reader:
        async with gateway.browser() as browser:
            cookie = browser.cookie()
        key = f"Authorization: Bearer {ADMIN_KEY}" if "/api/" in path else f"Cookie: loraplex_session={cookie}"
        reader, writer = await connect(gateway, receive_buffer=2**12)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: gateway\r\n{key}\r\n\r\n".encode())
        made.append(Reader(reader, writer))
        return made[-1]

    yield send
    for each in made:
        each.writer.transport.abort()


@pytest.mark.usefixtures("small_send_buffers")
async def test_readers_below_the_minimum_rate_are_cut_off_and_free_their_places(
    serve: Any, ask: Ask, database: Database
):
    async with serve(slow_reader_seconds=2.0, **SMALL) as gateway:
        await fill(database, FEW_ROWS)
        readers = [await ask(gateway, path) for path in (*[USAGE] * EXPORTS, LOG)]

        async def status() -> int:
            return (await gateway.admin.get(f"{USAGE}&tenant=none")).status

        async def num_cut() -> float:
            return await metric(gateway, "loraplex_gateway_slow_readers_cut_total")

        await until(lambda: _is(status, 503))
        await until(lambda: _is(status, 200))
        await until(lambda: _is(num_cut, EXPORTS + 1))
        assert len((await gateway.admin.get(USAGE)).json) == FEW_ROWS
        for reader in readers:
            rest = await reader.rest()
            assert rest.startswith(b"HTTP/1.1 200")
            assert not rest.endswith(b"0\r\n\r\n")


@pytest.mark.usefixtures("small_send_buffers")
async def test_an_export_ends_at_its_deadline(
    serve: Any, ask: Ask, database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "EXPORT_SECONDS", 1.0)
    async with serve(**SMALL) as gateway:
        await fill(database, FEW_ROWS)
        readers = [await ask(gateway, path) for path in (LOG, USAGE)]
        # Nothing is read, but the least rate is judged after a minute only.
        await asyncio.sleep(3.0)
        for reader in readers:
            rest = await reader.rest()
            assert rest.startswith(b"HTTP/1.1 200")
            assert not rest.endswith(b"0\r\n\r\n")
        assert await metric(gateway, "loraplex_gateway_slow_readers_cut_total") == 0


@pytest.mark.usefixtures("small_send_buffers")
async def test_a_reader_that_keeps_up_with_the_minimum_rate_gets_the_whole_file(
    serve: Any, ask: Ask, database: Database
):
    # The file takes several times as long. A busy machine may stop this process, and so the reader, for a second.
    async with serve(slow_reader_seconds=2.0, min_read_rate=100_000.0, **SMALL) as gateway:
        await fill(database, ROWS)
        reader, got = await ask(gateway, LOG), b""
        while not got.endswith(b"0\r\n\r\n"):
            piece = await asyncio.wait_for(reader.reader.read(2**18), 30.0)
            assert piece, "it was cut off"
            got += piece
            await asyncio.sleep(0.08)
        assert got.count(b'"request_id":"req_') == ROWS


async def _is(read: Any, expected: int) -> bool:
    return bool(await read() == expected)
