"""Whole answers on their way to the client: received and sent in pieces, all of them counted as unread."""

import asyncio
import itertools
from typing import Any

import pytest
from aiohttp.http_writer import StreamWriter

from gateway.fleet.large_objects import PIECE_BYTES
from testing.gateway.running import until
from tests.gateway.api.conftest import Ask
from tests.gateway.api.test_delivery import MANY, UNREAD, metric

# Larger than the kernel's buffers of a connection.
LARGE = 7 * 2**20


async def test_a_large_answer_is_sent_in_pieces_between_which_others_run(serve: Any, monkeypatch: pytest.MonkeyPatch):
    turns, at_writes = 0, list[tuple[int, int]]()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    write = StreamWriter.write

    async def recorded(self: StreamWriter, chunk: Any, **options: Any) -> None:
        if len(chunk) > PIECE_BYTES // 2:
            at_writes.append((turns, len(chunk)))
        await write(self, chunk, **options)

    async with serve() as gateway:
        acme = await gateway.tenant("acme", **MANY)
        small = await acme.complete(x_engine={"pad": 3})
        monkeypatch.setattr(StreamWriter, "write", recorded)
        counting = asyncio.create_task(count())
        got = await acme.complete(x_engine={"pad": LARGE})
        counting.cancel()
    assert (got.json.pop("pad"), small.json.pop("pad")) == ("x" * LARGE, "xxx")
    assert got.json.keys() == small.json.keys()
    # The engine of this test writes its answer at once, and in this process too.
    sent = [each for each in at_writes if each[1] < LARGE]
    assert sum(size for _, size in sent) >= LARGE
    assert max(size for _, size in sent) <= 2 * PIECE_BYTES
    assert all(after > before for (before, _), (after, _) in itertools.pairwise(sent))


async def test_a_client_that_leaves_while_a_large_answer_is_sent_returns_its_memory(
    serve: Any, ask: Ask, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    write, leaving = StreamWriter.write, asyncio.Event()

    async def leaves_at_the_first(self: StreamWriter, chunk: Any, **options: Any) -> None:
        await write(self, chunk, **options)
        if PIECE_BYTES <= len(chunk) < LARGE and not leaving.is_set():
            reader.writer.transport.abort()
            leaving.set()

    async with serve() as gateway:
        acme = await gateway.tenant("acme", **MANY)
        monkeypatch.setattr(StreamWriter, "write", leaves_at_the_first)
        reader = await ask(gateway, acme, x_engine={"pad": LARGE})
        await asyncio.wait_for(leaving.wait(), 30.0)

        async def is_returned() -> bool:
            return await metric(gateway, UNREAD) == 0 and len(await acme.usage()) == 1

        await until(is_returned)
        assert (await acme.complete(x_engine={"pad": LARGE})).status == 200
    assert "Error handling request" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_all_of_a_large_answer_counts_as_unread_before_it_is_sent(
    serve: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch
):
    """A client that does not read and one whose answer is only begun hold the same memory."""
    write, begun, goes_on = StreamWriter.write, asyncio.Event(), asyncio.Event()

    async def stops_at_the_second(self: StreamWriter, chunk: Any, **options: Any) -> None:
        await write(self, chunk, **options)
        if PIECE_BYTES <= len(chunk) < LARGE:
            begun.set()
            await goes_on.wait()

    async with serve() as gateway:
        acme = await gateway.tenant("acme", **MANY)
        monkeypatch.setattr(StreamWriter, "write", stops_at_the_second)
        reader = await ask(gateway, acme, x_engine={"pad": LARGE})
        await asyncio.wait_for(begun.wait(), 30.0)
        # Longer than the interval between two looks at the connections.
        await asyncio.sleep(1.2)
        assert await metric(gateway, UNREAD) >= LARGE
        goes_on.set()
        await reader.find(b'"usage"')
