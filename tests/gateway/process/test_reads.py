"""Reads of bounded size."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import pairwise

import pytest
import uvloop
from aiohttp import web

from gateway.api.requests.body_reader import READ_BUFFER_BYTES
from gateway.process.reads import LARGE_READ_BYTES, READ_BYTES, BoundedReads, EndQueue, bound_reads, large_reads

SIZE = 8 * 2**20
# Bytes that a client tries to send behind a request.
UNASKED = 32 * 2**20


@asynccontextmanager
async def serving(path: str, handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[int]:
    """Serve POST requests by bounded reads. Return the port."""
    app = web.Application()
    app.router.add_post(path, handle)
    runner = web.AppRunner(app, read_bufsize=READ_BUFFER_BYTES)
    await runner.setup()
    bound_reads(runner)
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def serve_a_large_body() -> tuple[int, str]:
    """Send a large body that is read late. Return what arrived before it was read, and the answer: its size."""
    arrived: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def handle(request: web.Request) -> web.Response:
        before = -1
        while before != request.content.total_bytes:
            before = request.content.total_bytes
            await asyncio.sleep(0.1)
        arrived.set_result(before)
        size, largest = 0, 0
        with large_reads(request):
            request.content.set_read_chunk_size(LARGE_READ_BYTES)
            async for piece in request.content.iter_any():
                size, largest = size + len(piece), max(largest, len(piece))
        assert largest > 4 * READ_BYTES
        return web.Response(text=str(size))

    async with serving("/", handle) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % SIZE)
        writer.write(bytes(SIZE))
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return await arrived, answer.decode().rpartition("\r\n")[2]


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_unread_body_takes_little_memory_and_arrives_whole_once_it_is_read(
    make_loop: Callable[[], asyncio.AbstractEventLoop], starts_servers: None
):
    with asyncio.Runner(loop_factory=make_loop) as runner:
        arrived, answer = runner.run(asyncio.wait_for(serve_a_large_body(), 60))
    assert 0 < arrived <= 2 * READ_BUFFER_BYTES + READ_BYTES
    assert int(answer) == SIZE


async def send_behind_an_upgrade() -> int:
    """Ask for an upgrade that is declined late. Return how many bytes the client could send before the answer."""
    release = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        await release.wait()
        return web.Response(text="declined")

    async with serving("/", handle) as port:
        loop, sent = asyncio.get_running_loop(), 0
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setblocking(False)
            head = (
                b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n"
            )
            await loop.sock_sendall(client, head)
            with suppress(TimeoutError):
                while sent < UNASKED:
                    async with asyncio.timeout(1):
                        await loop.sock_sendall(client, bytes(2**20))
                    sent += 2**20
            release.set()
            assert (await asyncio.wait_for(loop.sock_recv(client, 100), 10)).startswith(b"HTTP/1.1 200")
    return sent


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_follows_a_request_for_an_upgrade_is_not_kept(
    make_loop: Callable[[], asyncio.AbstractEventLoop], starts_servers: None
):
    with asyncio.Runner(loop_factory=make_loop) as runner:
        sent = runner.run(asyncio.wait_for(send_behind_an_upgrade(), 60))
    # The sockets' buffers take a few MiB.
    assert sent < UNASKED // 2


async def exchange(number: int, port: int) -> None:
    """Send bodies over one connection in small pieces, and compare the answers, which repeat them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for turn in range(2):
        body = bytes([number, turn]) * READ_BYTES * 2
        head = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (number, len(body))
        data = head + body
        cuts = [0, 10, len(head) - 1, *range(len(head) + 1, len(data), 6000 + number), len(data)]
        for start, end in pairwise(cuts):
            writer.write(data[start:end])
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert await reader.readexactly(len(body)) == body
    writer.close()
    await writer.wait_closed()


async def serve_interleaved_bodies(connections: int) -> None:
    """Repeat bodies that arrive together and are read late, every second one by large reads."""

    async def repeat(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        await asyncio.sleep(0.002 * (number % 5))
        with large_reads(request) if number % 2 else nullcontext():
            pieces = [piece async for piece in request.content.iter_any()]
        return web.Response(body=b"".join(pieces))

    async with serving("/{number}", repeat) as port:
        await asyncio.gather(*(exchange(number, port) for number in range(connections)))


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_no_connection_gets_another_ones_bytes(
    make_loop: Callable[[], asyncio.AbstractEventLoop], starts_servers: None
):
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(serve_interleaved_bodies(48), 60))


class Pieces(asyncio.Protocol):
    def __init__(self) -> None:
        self.received: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.received.append(data)


def test_a_piece_stays_as_it_is_while_other_connections_read():
    small, large = memoryview(bytearray(4)), memoryview(bytearray(8))
    handlers = Pieces(), Pieces()
    one, other = (BoundedReads(handler, small, large, EndQueue()) for handler in handlers)
    one.get_buffer(-1)[:] = b"mine"
    # A read ends in the buffer in which it began.
    one.is_large = True
    one.buffer_updated(4)
    one.get_buffer(-1)[:] = b"our mine"
    one.buffer_updated(8)
    for _ in range(2):
        other.get_buffer(-1)[:4] = b"your"
        other.buffer_updated(3)
        other.is_large = not other.is_large
        other.get_buffer(-1)[:4] = b"your"
    assert (handlers[0].received, handlers[1].received) == ([b"mine", b"our mine"], [b"you", b"you"])


async def test_clients_that_leave_together_end_a_few_at_a_time():
    ends, ended, seen = EndQueue(each=3), list[int](), []

    class Handler(asyncio.Protocol):
        def __init__(self, number: int) -> None:
            self.number = number

        def connection_lost(self, exc: Exception | None) -> None:
            ended.append(self.number)

    for number in range(20):
        ends.add(Handler(number), None)
    while len(ended) < 20:
        seen.append(len(ended))
        await asyncio.sleep(0)
    assert ended == list(range(20))
    assert max(after - before for before, after in pairwise([0, *seen, 20])) == 3
    # A later one ends at once.
    await asyncio.sleep(0)
    ends.add(Handler(20), None)
    assert ended[-1] == 20
