"""Clients that do not read."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from testing.gateway.running import BASE_MODEL, Client, Gateway
from tests.gateway.api.inference.test_time_limits import connect, head


class Reader:
    """A client that sends a request and reads nothing of the answer."""

    def __init__(self, reader: Any, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def rest(self) -> bytes:
        """Read until the connection ends."""
        got = b""
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.wait_for(self.reader.read(2**20), 30.0):
                got += piece
        return got

    async def find(self, wanted: bytes) -> None:
        """Read until the bytes arrive."""
        end = b""
        while wanted not in end:
            piece = await asyncio.wait_for(self.reader.read(2**16), 60.0)
            assert piece, "the stream ended without them"
            end = end[-len(wanted) :] + piece


Ask = Callable[..., Awaitable[Reader]]


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Return a sender of requests whose answers are not read. It closes all connections at the end.

    ends: whether the connection ends with its answer.
    """
    made: list[Reader] = []

    async def send(gateway: Gateway, client: Client, *, ends: bool = False, **body: Any) -> Reader:
        reader, writer = await connect(gateway, receive_buffer=2**12)
        raw = json.dumps({"model": BASE_MODEL, "prompt": "Hi", **body}).encode()
        writer.write(head(client, len(raw))[:-2] + b"Connection: close\r\n" * ends + b"\r\n" + raw)
        made.append(Reader(reader, writer))
        return made[-1]

    yield send
    for each in made:
        each.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await each.writer.wait_closed()
