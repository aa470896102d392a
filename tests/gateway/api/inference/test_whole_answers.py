"""Whole answers on their way to the client: received and sent in pieces, all of them counted as unread."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import aiohttp
import msgspec
import pytest
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict

from gateway.api.inference import completions
from gateway.api.inference.delivery import PIECES_PER_REST, WholeBody
from gateway.errors import UpstreamFailed
from gateway.fleet.calls.answers import read_answer
from gateway.fleet.calls.json_field_scanner import PIECE_BYTES
from gateway.sharing.start_limiter import StartLimiter
from testing.gateway.running import until
from tests.gateway.api.conftest import Ask
from tests.gateway.api.inference.test_delivery import MANY, UNREAD, metric

# Larger than the kernel's buffers of a connection.
LARGE = 7 * 2**20


@asynccontextmanager
async def iterations_counted() -> AsyncIterator[list[int]]:
    """Yield the number of iterations of the event loop in which another task has run."""
    iterations = [0]

    async def count() -> None:
        while True:
            iterations[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        yield iterations
    finally:
        counting.cancel()


async def test_others_run_between_the_pieces_of_an_answer_that_is_received():
    """All of it has arrived, so nothing else makes the reader wait."""
    answer = msgspec.json.encode({"id": "x", "pad": "x" * LARGE})
    content = aiohttp.StreamReader(Mock(), 2**30)
    content.feed_data(answer)
    content.feed_eof()
    lengths = CIMultiDict({"x-loraplex-fields": f'{{"id":3,"pad":{LARGE + 2}}}'})
    response = cast(Any, SimpleNamespace(content_length=len(answer), content=content, headers=lengths))

    async def reserve(size: int) -> None:
        assert size == len(answer)

    async with iterations_counted() as iterations:
        fields = await read_answer(response, 2**23, reserve, is_own=True)
    assert len(fields["pad"]) == LARGE + 2
    assert iterations[0] >= LARGE // PIECE_BYTES


async def test_each_piece_of_an_answer_is_received_and_scanned_in_an_iteration_of_its_own():
    answer = msgspec.json.encode({"id": "x", "pad": "x" * LARGE})
    content = aiohttp.StreamReader(Mock(), 2**30)
    content.feed_data(answer)
    content.feed_eof()
    response = cast(Any, SimpleNamespace(content_length=len(answer), content=content, headers=CIMultiDict()))
    before_piece = Mock(side_effect=lambda: asyncio.sleep(0))
    fields = await read_answer(response, 2**23, AsyncMock(), before_piece=before_piece)
    assert len(fields["pad"]) == LARGE + 2
    assert before_piece.call_count >= 2 * (LARGE // PIECE_BYTES)


async def test_a_tenant_has_one_piece_of_all_its_large_answers_in_an_iteration_and_rests(
    serve: Any, monkeypatch: pytest.MonkeyPatch
):
    """A neighbour's chat needs some two dozen iterations, and waits for all pieces in each of them."""
    write, rest, sent, rests = StreamWriter.write, StartLimiter.rest, list[int](), list[str]()

    async def recorded(self: StreamWriter, chunk: Any, **options: Any) -> None:
        if len(chunk) > PIECE_BYTES // 2:
            sent.append(iterations[0])
        await write(self, chunk, **options)

    def counted(self: StartLimiter, owner: str, seconds: float) -> None:
        rests.append(owner)
        rest(self, owner, seconds)

    async with serve() as gateway:
        acme = await gateway.tenant("acme", **MANY)
        monkeypatch.setattr(StreamWriter, "write", recorded)
        monkeypatch.setattr(StartLimiter, "rest", counted)
        async with iterations_counted() as iterations:
            got = await asyncio.gather(*(acme.complete(x_engine={"pad": LARGE}) for _ in range(4)))
    assert [answer.status for answer in got] == [200] * 4
    assert len(sent) >= 4 * (LARGE // (2 * PIECE_BYTES))
    assert max(Counter(sent).values()) == 1
    assert len(set(rests)) == 1
    # Pieces are received too, and some of them are smaller than PIECE_BYTES.
    received = 2 * (LARGE // PIECE_BYTES)
    assert len(rests) >= (received + len(sent)) // PIECES_PER_REST


async def test_a_large_answer_is_sent_in_pieces_between_which_others_run(serve: Any, monkeypatch: pytest.MonkeyPatch):
    write, sent = StreamWriter.write, list[tuple[int, int]]()

    async def recorded(self: StreamWriter, chunk: Any, **options: Any) -> None:
        if len(chunk) > PIECE_BYTES // 2:
            sent.append((iterations[0], len(chunk)))
        await write(self, chunk, **options)

    async with serve() as gateway:
        acme = await gateway.tenant("acme", **MANY)
        small = await acme.complete(x_engine={"pad": 3})
        monkeypatch.setattr(StreamWriter, "write", recorded)
        async with iterations_counted() as iterations:
            got = await acme.complete(x_engine={"pad": LARGE})
    assert (got.json.pop("pad"), small.json.pop("pad")) == ("x" * LARGE, "xxx")
    assert got.json.keys() == small.json.keys()
    assert sum(size for _, size in sent) >= LARGE
    assert max(size for _, size in sent) <= 2 * PIECE_BYTES
    assert all(after > before for (before, _), (after, _) in itertools.pairwise(sent))


async def test_a_client_that_leaves_while_a_large_answer_is_sent_returns_its_memory(
    serve: Any, ask: Ask, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    write, leaving = StreamWriter.write, asyncio.Event()

    async def leaves_at_the_first(self: StreamWriter, chunk: Any, **options: Any) -> None:
        await write(self, chunk, **options)
        if len(chunk) >= PIECE_BYTES and not leaving.is_set():
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

    async def stops_at_the_first(self: StreamWriter, chunk: Any, **options: Any) -> None:
        await write(self, chunk, **options)
        if len(chunk) >= PIECE_BYTES:
            begun.set()
            await goes_on.wait()

    async with serve() as gateway:
        acme = await gateway.tenant("acme", **MANY)
        monkeypatch.setattr(StreamWriter, "write", stops_at_the_first)
        reader = await ask(gateway, acme, x_engine={"pad": LARGE})
        await asyncio.wait_for(begun.wait(), 30.0)
        # Longer than the interval between two looks at the connections.
        await asyncio.sleep(1.2)
        # The system's buffers may have taken the first piece.
        assert await metric(gateway, UNREAD) > LARGE - 2 * PIECE_BYTES
        goes_on.set()
        await reader.find(b'"usage"')


async def test_a_gateway_that_stops_waits_for_the_client_of_a_large_answer(serve: Any, ask: Ask):
    begins = asyncio.Event()
    async with serve(shutdown_seconds=60.0) as gateway:
        acme = await gateway.tenant("acme", **MANY)
        reader = await ask(gateway, acme, x_engine={"pad": LARGE})

        async def is_sent() -> bool:
            return await metric(gateway, UNREAD) > PIECE_BYTES and len(await acme.usage()) == 1

        await until(is_sent)

        async def read_late() -> bytes:
            # The gateway takes less than this to stop if it waits for nobody.
            await asyncio.sleep(3.0)
            begins.set()
            return await reader.rest()

        reading = asyncio.create_task(read_late())
        gateway.connections.clear()
    assert begins.is_set()
    got = await reading
    assert len(got) > LARGE
    assert got.endswith(b"}")


async def test_an_answer_that_fails_returns_the_memory_that_it_was_granted(serve: Any, monkeypatch: pytest.MonkeyPatch):
    """Its client keeps the connection, and uses it for other requests."""

    async def fails(*arguments: Any, **options: Any) -> Any:
        await read_answer(*arguments, **options)
        raise UpstreamFailed("The engine's answer is not as long as its header says.")

    monkeypatch.setattr(completions, "read_answer", fails)
    async with serve() as gateway:
        acme = await gateway.tenant("acme", **MANY)
        assert (await acme.complete(x_engine={"pad": LARGE})).status == 502

        async def is_returned() -> bool:
            assert (await acme.get("/v1/models")).status == 200
            return await metric(gateway, UNREAD) == 0

        await until(is_returned, 10.0)


async def test_a_connection_keeps_nothing_of_an_answer_that_was_read(serve: Any, monkeypatch: pytest.MonkeyPatch):
    bodies, init = list[WholeBody](), WholeBody.__init__

    def recorded(self: WholeBody, *arguments: Any) -> None:
        init(self, *arguments)
        bodies.append(self)

    monkeypatch.setattr(WholeBody, "__init__", recorded)
    async with serve() as gateway:
        acme = await gateway.tenant("acme", **MANY)
        got = await acme.complete(x_engine={"pad": LARGE})
        assert len(got.json["pad"]) == LARGE
        [body] = bodies
        await until(lambda: asyncio.sleep(0, body.decode() == ""))
