"""Reads of bounded size from each connection, and ends of connections in turn.

An event loop reads up to 256 KiB at once, and aiohttp pauses a connection only after its buffer is over the limit.
Without a bound, each connection with an unread body held the whole content of its socket's buffer: 64 MiB for 500
connections.

The end of a connection cancels its request, which takes 0.3 ms. The event loop learns of the ends of 500 clients in one
iteration if they leave at once, so each iteration passes on a few of them.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

# Limit of a read in bytes. aiohttp pauses a connection with an unread body after two such reads.
READ_BYTES = 2**14
# Limit of a read of an upload in bytes. Smaller reads would take 4 to 12 ms of the event loop per MiB.
# The copies of a larger piece have pages of their own (gateway/serve.py), whose first use takes 1 ms for each MiB.
LARGE_READ_BYTES = 2**17
# Ends of connections that one iteration of the event loop passes on.
ENDS_PER_ITERATION = 4


class EndQueue:
    """Ends of connections that are passed on to their handlers in the order of arrival, a few in each iteration."""

    def __init__(self, each: int = ENDS_PER_ITERATION) -> None:
        self._each = each
        self._waiting: deque[tuple[asyncio.BaseProtocol, Exception | None]] = deque()
        self._num_passed = 0

    def add(self, handler: asyncio.BaseProtocol, error: Exception | None) -> None:
        """Pass on the end of a handler's connection, in this iteration if that is possible."""
        if self._num_passed < self._each and not self._waiting:
            self._pass_on(handler, error)
        else:
            self._waiting.append((handler, error))

    def _pass_on(self, handler: asyncio.BaseProtocol, error: Exception | None) -> None:
        if not self._num_passed:
            asyncio.get_running_loop().call_soon(self._next)
        self._num_passed += 1
        handler.connection_lost(error)

    def _next(self) -> None:
        self._num_passed = 0
        while self._waiting and self._num_passed < self._each:
            self._pass_on(*self._waiting.popleft())


class Forwarding(asyncio.BufferedProtocol):
    """A connection's protocol that forwards all events except the data to `handler`.

    buffer: receives the data. All connections share one, because the event loop handles each read before the next.
    ends: passes on the end of the connection.
    """

    def __init__(self, handler: asyncio.Protocol, buffer: memoryview, ends: EndQueue) -> None:
        self._handler = handler
        self._buffer = buffer
        self.ends = ends

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.add(self._handler, exc)

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


class BoundedReads(Forwarding):
    """The protocol of a connection that forwards its data in pieces of at most the buffer's size."""

    def __init__(self, handler: asyncio.Protocol, buffer: memoryview, large_buffer: memoryview, ends: EndQueue) -> None:
        super().__init__(handler, buffer, ends)
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
    ends = EndQueue()

    def connection_made(handler: Any, transport: asyncio.Transport) -> None:
        made(handler, transport)
        # The event loop starts to read only after this call, so no data bypasses the bound.
        transport.set_protocol(BoundedReads(handler, buffer, large_buffer, ends))

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
