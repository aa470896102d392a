"""Reads of bounded size."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop
from aiohttp import web

from gateway.api.requests.pieces import READ_BUFFER_BYTES
from gateway.process.reads import LARGE_READ_BYTES, READ_BYTES, bound_reads, large_reads

SIZE = 8 * 2**20


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

    app = web.Application(client_max_size=2 * SIZE)
    app.router.add_post("/", handle)
    runner = web.AppRunner(app, read_bufsize=READ_BUFFER_BYTES)
    await runner.setup()
    bound_reads(runner)
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % SIZE)
        writer.write(bytes(SIZE))
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return await arrived, answer.decode().rpartition("\r\n")[2]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_unread_body_takes_little_memory_and_arrives_whole_once_it_is_read(
    make_loop: Callable[[], asyncio.AbstractEventLoop], starts_servers: None
):
    with asyncio.Runner(loop_factory=make_loop) as runner:
        arrived, answer = runner.run(asyncio.wait_for(serve_a_large_body(), 60))
    assert 0 < arrived <= 2 * READ_BUFFER_BYTES + READ_BYTES
    assert int(answer) == SIZE
