"""Connections that send what is no HTTP."""

import asyncio
import gc
import tracemalloc

import pytest
from aiohttp import web

from wire.http_requests import guard_requests

CONNECTIONS = 40
UPGRADE = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
PLAIN = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("head", [b"", PLAIN, UPGRADE], ids=["alone", "after a request", "after an upgrade"])
async def test_what_is_no_http_leaves_nothing_in_memory(head: bytes, starts_servers: None):
    """The parser's errors quote the client and were kept by cycles until the next full garbage collection."""

    async def handle(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def send_zeros(port: int, number: int = 2**20) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = b""
        try:
            writer.write(head + bytes(number))
            while piece := await reader.read(2**16):
                answer += piece
        except ConnectionError:
            # The server closes the connection with unread bytes.
            pass
        writer.close()
        return answer

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    guard_requests(runner)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        refused = await send_zeros(port, 100)
        assert b" 400 Bad Request" in refused
        assert refused.endswith(b"\r\n\r\nInvalid method encountered.")
        gc.collect()
        gc.disable()
        tracemalloc.start()
        answers = [await send_zeros(port) for _ in range(CONNECTIONS)]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
        await runner.cleanup()
    assert kept < CONNECTIONS * 2**14
    assert max(map(len, answers)) < 1000
