"""Reads of bounded size from each connection.

An event loop reads up to 256 KB at once, and aiohttp pauses a connection only after it got more than it wants. So each
connection with an unread body held all that its socket's buffer had: 64 MiB for 500 connections.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

# Most bytes of one read. aiohttp pauses a connection whose body nobody reads after three of them.
READ_BYTES = 2**14
# Most bytes of one read while an upload waits for them. Small reads would cost it 4 ms of the event loop for each MiB.
LARGE_READ_BYTES = 2**18


class Forwarding(asyncio.BufferedProtocol):
    """A connection's protocol that forwards all events but the data. handler: the one that gets them.

    buffer: where data arrives. All connections share one, because each read is handled before the next.
    """

    def __init__(self, handler: asyncio.Protocol, buffer: memoryview) -> None:
        self._handler = handler
        self._buffer = buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


class BoundedReads(Forwarding):
    """The protocol of a connection that forwards its data in pieces of at most the buffer's size."""

    def __init__(self, handler: asyncio.Protocol, buffer: memoryview, large_buffer: memoryview) -> None:
        super().__init__(handler, buffer)
        self._large_buffer = large_buffer
        self._used = buffer
        self.is_large = False

    def get_buffer(self, sizehint: int) -> memoryview:
        self._used = self._large_buffer if self.is_large else self._buffer
        return self._used

    def buffer_updated(self, nbytes: int) -> None:
        self._handler.data_received(bytes(self._used[:nbytes]))


def bound_reads(runner: web.BaseRunner) -> None:
    """Bound the reads of all connections to a runner that has been set up."""
    server = runner.server
    assert server is not None
    made, buffer, large_buffer = server.connection_made, _buffer(READ_BYTES), _buffer(LARGE_READ_BYTES)

    def connection_made(handler: Any, transport: asyncio.Transport) -> None:
        made(handler, transport)
        # The loop starts to read only after this.
        transport.set_protocol(BoundedReads(handler, buffer, large_buffer))

    server.connection_made = connection_made  # type: ignore[method-assign]


@contextmanager
def large_reads(request: web.BaseRequest) -> Iterator[None]:
    """Allow large reads of the request's connection during the block, which waits for its body."""
    reads = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(reads, BoundedReads):
        yield
        return
    reads.is_large = True
    try:
        yield
    finally:
        reads.is_large = False


def _buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))
