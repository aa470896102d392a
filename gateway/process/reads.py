"""Reads of bounded size from each connection.

An event loop reads up to 256 KB at once, and aiohttp pauses a connection only after it got more than it wants. So each
connection with an unread body held all that its socket's buffer had: 64 MiB for 500 connections.
"""

import asyncio
from typing import Any

from aiohttp import web

# Most bytes of one read. aiohttp pauses a connection whose body nobody reads after three of them.
READ_BYTES = 2**14


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

    def buffer_updated(self, nbytes: int) -> None:
        self._handler.data_received(bytes(self._buffer[:nbytes]))


def bound_reads(runner: web.BaseRunner, size: int = READ_BYTES) -> None:
    """Bound the reads of all connections to a runner that has been set up."""
    server = runner.server
    assert server is not None
    made, buffer = server.connection_made, memoryview(bytearray(size))

    def connection_made(handler: Any, transport: asyncio.Transport) -> None:
        made(handler, transport)
        # The loop starts to read only after this.
        transport.set_protocol(BoundedReads(handler, buffer))

    server.connection_made = connection_made  # type: ignore[method-assign]
