"""Reads of bounded size from each connection.

An event loop reads up to 256 KiB at once, and aiohttp pauses a connection only after its buffer is over the limit.
Without a bound, each connection with an unread body held the whole content of its socket's buffer: 64 MiB for 500
connections.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

# Limit of a read in bytes. aiohttp pauses a connection with an unread body after three such reads.
READ_BYTES = 2**14
# Limit of a read of an upload in bytes. Smaller reads would take 4 to 12 ms of the event loop per MiB.
LARGE_READ_BYTES = 2**18


class Forwarding(asyncio.BufferedProtocol):
    """A connection's protocol that forwards all events except the data to `handler`.

    buffer: receives the data. All connections share one, because the event loop handles each read before the next.
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
        # The event loop starts to read only after this call, so no data bypasses the bound.
        transport.set_protocol(BoundedReads(handler, buffer, large_buffer))

    server.connection_made = connection_made  # type: ignore[method-assign]


@contextmanager
def large_reads(request: web.BaseRequest) -> Iterator[None]:
    """Allow large reads of the request's connection during the block, which reads its body."""
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
