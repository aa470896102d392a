"""Clients that read all the time, but below the least rate."""

import asyncio
import contextlib
import json
import socket
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from gateway.api.inference.delivery import Deliveries, Delivery
from testing.gateway.running import BASE_MODEL, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.conftest import Ask
from tests.gateway.api.inference.test_delivery import LONG, MANY, UNREAD, check_billed, metric
from tests.gateway.api.inference.test_time_limits import head

# A fifth of the least rate.
PIECE_BYTES, PAUSE_SECONDS, MIN_READ_RATE = 1024, 0.1, 50_000.0


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system buffer little of an answer: with a large buffer the gateway sees no progress of a slow reader."""
    opened = Deliveries.open

    def open_small(deliveries: Deliveries, request: web.Request, owner: str) -> AbstractContextManager[Delivery]:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**12)
        return opened(deliveries, request, owner)

    monkeypatch.setattr(Deliveries, "open", open_small)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_of_some_bytes_a_second_is_cut_off_and_billed(stream: bool, serve: Any, upstream: Upstream):
    of = {"max_model_len": LONG, "slow_reader_seconds": 2.0, "min_read_rate": MIN_READ_RATE}
    # A bare socket, because a stream reads ahead.
    with socket.socket() as plain:
        async with serve(**of) as gateway:
            slow = await gateway.tenant("slow", **MANY)
            tokens, pad = (1000, 2**16) if stream else (3, 7 * 2**20)
            how = {"tokens": tokens, "pad": pad}
            body = {"model": BASE_MODEL, "prompt": "Hi", "stream": stream, "max_tokens": tokens, "x_engine": how}
            raw = json.dumps(body).encode()
            loop, address = asyncio.get_running_loop(), urlsplit(gateway.url)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            plain.setblocking(False)
            await loop.sock_connect(plain, (address.hostname, address.port))
            await loop.sock_sendall(plain, head(slow, len(raw)) + raw)
            read: list[int] = []

            is_slow = True

            async def read_all() -> None:
                with contextlib.suppress(ConnectionError):
                    while piece := await loop.sock_recv(plain, PIECE_BYTES if is_slow else 2**20):
                        read.append(len(piece))
                        await asyncio.sleep(PAUSE_SECONDS if is_slow else 0)

            reading = asyncio.create_task(read_all())

            async def is_cut() -> bool:
                return await metric(gateway, "loraplex_gateway_slow_readers_cut_total") == 1

            await until(is_cut, 60.0)
            # It was still reading, for at least half of the time over which its rate is measured.
            assert len(read) >= 10
            # The system still sends what it took from the gateway before.
            is_slow = False
            await asyncio.wait_for(reading, 30.0)
            assert sum(read) < 7 * 2**20

            await check_billed(gateway, slow, upstream)


@pytest.mark.usefixtures("small_buffers")
async def test_an_unread_answer_counts_and_is_cut_off_also_if_its_connection_closes_behind_it(serve: Any, ask: Ask):
    """The server has nothing left to write, so it closes the connection and only the unread bytes keep it."""
    async with serve(slow_reader_seconds=1.5) as gateway:
        acme, seen = await gateway.tenant("acme", **MANY), []
        await ask(gateway, acme, ends=True, x_engine={"pad": 500_000})

        async def is_cut() -> bool:
            seen.append(await metric(gateway, UNREAD))
            return await metric(gateway, "loraplex_gateway_slow_readers_cut_total") == 1

        await until(is_cut)
        assert max(seen) > 2**18
