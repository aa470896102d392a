"""Slow clients and engines: the time limit of each, and bounded memory in that time."""

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientTimeout

from testing.gateway.running import BASE_MODEL, Client, Gateway, until
from testing.gateway.upstream import Upstream

EVENTS = 200
# Larger than all socket buffers between the engine and the client together.
TOKENS_PER_EVENT = 100_000


async def connect(gateway: Gateway, receive_buffer: int | None = None) -> tuple[Any, asyncio.StreamWriter]:
    plain = socket.socket()
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.setblocking(False)
    address = urlsplit(gateway.url)
    await asyncio.get_running_loop().sock_connect(plain, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=2**16)
    gateway.connections.append(writer.transport)
    return reader, writer


def head(client: Client, length: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {client.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def test_a_head_that_never_ends(serve: Any):
    """Slowloris: a connection that keeps sending and never completes a request is closed."""
    async with serve(idle_timeout=0.5) as gateway:
        reader, writer = await connect(gateway)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: test\r\n")
        closed = asyncio.ensure_future(reader.read())
        while not closed.done():
            writer.write(b"x-more: and more\r\n")
            await asyncio.wait({closed}, timeout=0.05)
        # No answer, or cut off.
        assert closed.exception() is not None or closed.result() == b""
        writer.close()
        # Other clients are served all the time.
        assert (await gateway.nobody.get("/healthz")).status == 200


async def test_a_body_that_never_ends(serve: Any, upstream: Upstream):
    async with serve(body_timeout=0.5) as gateway:
        acme = await gateway.tenant("acme")
        reader, writer = await connect(gateway)
        writer.write(head(acme, 1000) + b'{"model":')
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer
        writer.close()
    assert upstream.requests == []


async def test_requests_that_never_end(serve: Any, upstream: Upstream):
    async with serve(request_timeout=5.0) as gateway:
        acme = await gateway.tenant("acme")
        how = {"max_tokens": 200, "x_engine": {"tokens": 200, "delay": 0.1}}
        # At once, because each waits for the whole limit.
        streamed, whole = await asyncio.gather(acme.complete(stream=True, **how), acme.complete(stream=False, **how))
        assert (streamed.status, whole.status) == (200, 504)
        assert streamed.events[-1]["error"]["code"] == whole.error["code"] == "time_limit_exceeded"

        async def cancelled() -> bool:
            return upstream.cancelled == len(upstream.requests) == 2

        await until(cancelled)


async def test_a_reader_that_stops_stops_the_engine(serve: Any, upstream: Upstream):
    """Nothing piles up in the gateway: the engine itself is blocked, and continues with the reader."""
    tokens = EVENTS * TOKENS_PER_EVENT
    async with serve(max_model_len=2 * tokens) as gateway:
        acme = await gateway.tenant("acme", tokens_per_minute=10 * tokens)
        reader, writer = await connect(gateway, receive_buffer=2**14)
        body = {"model": BASE_MODEL, "prompt": "Hi", "stream": True, "max_tokens": tokens}
        raw = json.dumps(body | {"x_engine": {"tokens": tokens, "per_event": TOKENS_PER_EVENT}}).encode()
        writer.write(head(acme, len(raw)) + raw)
        await reader.readuntil(b"\r\n\r\n")

        async def stopped() -> bool:
            before = upstream.events
            await asyncio.sleep(0.5)
            return 0 < before == upstream.events

        await until(stopped)
        assert upstream.events < EVENTS
        size = 0
        last = b""
        while not last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = await reader.read(2**16)
            assert piece, "the stream broke off"
            size, last = size + len(piece), (last + piece)[-64:]
        assert size > tokens
        writer.close()


async def test_a_whole_answer_may_take_longer_than_an_engines_silence(serve: Any, upstream: Upstream):
    """A whole answer's first byte is its last, so it may take longer; a stream's engine must not be silent as long."""
    async with serve(engine_timeout=4.0) as gateway:
        acme = await gateway.tenant("acme")
        whole, late = await asyncio.gather(
            acme.complete(x_engine={"tokens": 1, "delay": 6.0}),
            acme.complete(stream=True, x_engine={"tokens": 2, "pause": True}),
        )
        assert whole.status == 200
        assert late.events[-1]["error"]["code"] == "engine_error"
        upstream.paused = False


async def test_a_whole_answer_of_an_engine_that_fell_silent_ends(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    async with serve(engine_timeout=1.0, engine_heartbeat_timeout=1.0) as gateway:
        acme = await gateway.tenant("acme")

        async def is_followed() -> bool:
            return upstream.followers == 1

        await until(is_followed)
        monkeypatch.setattr("gateway.fleet.discovery.health_checks.HEALTH_TIMEOUT", ClientTimeout(total=1.0))
        upstream.mute = upstream.holds = True
        try:
            got = await asyncio.wait_for(acme.complete(), 60.0)
            assert got.status in (502, 503)
        finally:
            upstream.mute = upstream.holds = False
