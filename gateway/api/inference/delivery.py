"""Delivery of answers and exports: unread bytes take bounded memory, and a client that reads too slowly is cut off.

Unread bytes of an answer stay in its connection's write buffer, so a client that keeps up costs nothing. A stream's
buffer may grow to `reader_bytes`. Beyond that, or when the common memory of all clients is full, the engine is held
back and its place is freed (`Delivery.on_full`). A task checks all connections twice a second.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import ClientError, Payload, web
from aiohttp.abc import AbstractStreamWriter

from gateway.errors import ClientGone
from gateway.fleet.calls.json_field_scanner import PIECE_BYTES
from gateway.metrics import Metrics
from gateway.settings import Settings
from gateway.sharing.start_limiter import CLOCK_SECONDS, StartLimiter
from wire.bounded_dict import BoundedDict
from wire.shared_capacity import SharedCapacity

log = logging.getLogger(__name__)

# Unread bytes that any answer may have, so that a small answer never waits for memory.
FREE_BYTES = 2**16
# Bytes of HTTP's framing that a write adds to its data, at most.
FRAMING_BYTES = 64
# Pieces of a tenant's large answers after which it rests for CLOCK_SECONDS. They take some tenths of a millisecond.
PIECES_PER_REST = 4
LOOK_SECONDS = 0.5
# Minimum time over which a client's rate is measured while others wait for memory.
PRESSURE_SECONDS = 2.0
# Number of tenants whose turns are known.
MAX_OWNERS = 10_000


class Delivery:
    """The unread bytes of a connection.

    held: its share of the common memory, in bytes. reserved: bytes granted to an answer that are not written yet.
    """

    def __init__(self, deliveries: "Deliveries", transport: asyncio.WriteTransport) -> None:
        self.transport = transport
        self.owner = ""
        self.held = 0
        self.taken_at_mark = 0
        self.marked = time.monotonic()
        self.is_open = False
        self.on_full: Callable[[], None] | None = None
        self._deliveries = deliveries
        self.reserved = 0
        self._written = 0

    @property
    def unread(self) -> int:
        """Return the bytes in the connection's buffer, also of one that closes when they are read."""
        return self.transport.get_write_buffer_size()

    @property
    def taken(self) -> int:
        return self._written - self.unread

    async def reserve(self, size: int) -> None:
        """Wait until there is memory for a whole answer of `size` bytes."""
        if size > FREE_BYTES:
            await self._deliveries.wait_for_room(self, self.unread + size)

    async def wait_for_piece(self) -> None:
        """Wait for an iteration of the event loop in which a piece of the tenant's large answers may be handled."""
        await self._deliveries.wait_for_piece(self.owner)

    def whole(self, parts: list[bytes | memoryview]) -> "bytes | WholeBody":
        """Return the body of a whole answer that is written next. parts: its bytes, in order."""
        size = sum(map(len, parts))
        self._deliveries.hold(self, self.unread + size)
        if size > PIECE_BYTES:
            self.reserved = size
            return WholeBody(self, parts, size)
        self._written += size
        self.reserved = 0
        return b"".join(parts)

    async def write_whole(self, writer: AbstractStreamWriter, body: "WholeBody") -> None:
        """Write a body into the connection's buffer; other requests run between its pieces.

        If more than `reader_bytes` are unread then, wait until the client has read most of them.
        """
        self._limit_buffer(body.length)
        try:
            for piece in body.pieces():
                await self.wait_for_piece()
                self._written += len(piece)
                self.reserved -= len(piece)
                await writer.write(piece)
        finally:
            self.reserved = 0
            self._limit_buffer(self._deliveries.reader_bytes)
        await writer.drain()

    def _limit_buffer(self, size: int) -> None:
        """Let writes wait only beyond `size` unread bytes."""
        # uvloop raises RuntimeError for a connection that is lost.
        if not self.transport.is_closing():
            self.transport.set_write_buffer_limits(high=size)

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        """Write to the client. Waits only if its buffer or the common memory is full. Raises ClientGone."""
        self._written += len(data)
        if (size := self.transport.get_write_buffer_size() + len(data)) > FREE_BYTES:
            await self._fall_behind(size)
        try:
            await response.write(data)
        except (ClientError, ConnectionError) as error:
            raise ClientGone from error

    async def _fall_behind(self, size: int) -> None:
        """Hold memory for `size` unread bytes. If that or the write must wait, the engine's place is freed."""
        has_room = self._deliveries.has_room(self, size)
        if self.on_full is not None and (size + FRAMING_BYTES > self._deliveries.reader_bytes or not has_room):
            self.on_full()
        if not has_room:
            await self._deliveries.wait_for_room(self, size)
            self.reserved = 0
        self._deliveries.hold(self, size)

    def look(self, now: float) -> None:
        """Update the held bytes. If nothing is unread, begin a new measurement of the rate."""
        unread = self.unread
        self._deliveries.hold(self, unread + self.reserved)
        if not unread:
            self.mark(now)

    def mark(self, now: float) -> None:
        self.marked, self.taken_at_mark = now, self.taken


class WholeBody(Payload):
    """Body of a large answer, which can be written once. length: its size in bytes."""

    def __init__(self, delivery: Delivery, parts: list[bytes | memoryview], length: int) -> None:
        super().__init__(parts, content_type="application/json")
        self.length = self._size = length
        self._delivery = delivery
        self._parts = parts

    def pieces(self) -> Iterator[bytearray]:
        """Yield the body in pieces of one to two times PIECE_BYTES; the last one may be smaller."""
        piece = bytearray()
        for part in self._parts:
            for start in range(0, len(part), PIECE_BYTES):
                piece += part[start : start + PIECE_BYTES]
                if len(piece) >= PIECE_BYTES:
                    yield piece
                    piece = bytearray()
        # aiohttp keeps a response until the connection's next one, so the answer must not stay in it.
        self._parts.clear()
        if piece:
            yield piece

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._parts).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self._delivery.write_whole(writer, self)


class Deliveries:
    """The connections of all clients that receive answers.

    reader_bytes: the unread bytes of a stream at which its engine is held back. total_bytes: the memory for all unread
    answers, of which a tenant gets at most half, and with more than one answer no more than it leaves free.
    min_read_rate: bytes a second that a client with unread bytes must read, on average over `window` seconds.
    """

    def __init__(
        self, metrics: Metrics, *, reader_bytes: int, total_bytes: int, min_read_rate: float, window: float
    ) -> None:
        self._metrics = metrics
        self.reader_bytes = reader_bytes
        self._capacity = SharedCapacity(total_bytes)
        self._min_read_rate = min_read_rate
        self._window = window
        self._piece_limiter = StartLimiter()
        # Tenant -> pieces of its large answers since its last rest.
        self._pieces = BoundedDict[str, int](MAX_OWNERS)
        self._open: dict[asyncio.WriteTransport, Delivery] = {}
        # Answers that wait for memory, with their sizes, the longest waiting first.
        self._waiting: dict[asyncio.Event, tuple[Delivery, int]] = {}
        self._is_granting = False
        # Tenant -> number of the last grant of memory that it got.
        self._turns = BoundedDict[str, int](MAX_OWNERS)
        self._num_grants = 0
        metrics.watch_deliveries(lambda: self._capacity.held)

    @property
    def held(self) -> int:
        return self._capacity.held

    @contextmanager
    def open(self, request: web.Request, owner: str) -> Iterator[Delivery]:
        """Yield the delivery of a request's connection. Raises ClientGone."""
        # uvloop's transports have the methods of asyncio's and inherit from none of its classes.
        transport = cast(asyncio.WriteTransport | None, request.transport)
        if transport is None:
            raise ClientGone
        delivery = self._open.get(transport)
        if delivery is None:
            delivery = self._open[transport] = Delivery(self, transport)
        self._hold_for(delivery, owner)
        delivery.is_open, delivery.reserved, delivery.on_full = True, 0, None
        transport.set_write_buffer_limits(high=self.reader_bytes)
        try:
            yield delivery
        except BaseException:
            delivery.reserved = 0
            self.hold(delivery, delivery.unread)
            raise
        finally:
            delivery.is_open = False

    async def wait_for_piece(self, owner: str) -> None:
        """Wait for an iteration of the event loop in which a piece of the tenant's large answers may be handled.

        Another tenant's chat needs some two dozen iterations. If each of a tenant's large answers had a piece in each
        iteration, four answers would delay the chat by as much as its own work takes.
        """
        await self._piece_limiter.begin(owner)
        number = self._pieces.get(owner, 0) + 1
        if number == PIECES_PER_REST:
            self._piece_limiter.rest(owner, CLOCK_SECONDS)
        self._pieces.put(owner, number % PIECES_PER_REST)

    def hold(self, delivery: Delivery, size: int) -> None:
        """Set a delivery's share of the common memory to `size` bytes."""
        if size == delivery.held:
            return
        more = size - delivery.held
        delivery.held = size
        self._capacity.change(delivery.owner, more)
        if more < 0 and self._waiting and not self._is_granting:
            self._is_granting = True
            asyncio.get_running_loop().call_soon(self._grant)

    async def wait_for_room(self, delivery: Delivery, size: int) -> None:
        """Wait until the common memory has room for `size` unread bytes of a delivery in all, and hold them."""
        if not self._is_granting and self.has_room(delivery, size):
            self._give(delivery, size)
            return
        event = asyncio.Event()
        self._waiting[event] = delivery, size
        try:
            await event.wait()
        except asyncio.CancelledError:
            if self._waiting.pop(event, None) is None:
                delivery.reserved = 0
                self.hold(delivery, delivery.unread)
            raise

    def _grant(self) -> None:
        """Give memory to the waiting answers that have room, in the order of their tenants' turns.

        Without turns, a tenant's next large answer would take the memory that its last one frees, and other tenants
        would wait for all of them.
        """
        self._is_granting = False
        # The first answer of each tenant comes before the second of any, and the longest wait for a grant first.
        numbers = Counter[str]()
        ranked = []
        for event, (delivery, size) in self._waiting.items():
            numbers[delivery.owner] += 1
            turn = self._turns.get(delivery.owner, 0)
            ranked.append((numbers[delivery.owner], turn, event, delivery, size))
        for _, _, event, delivery, size in sorted(ranked, key=lambda each: each[:2]):
            if self.has_room(delivery, size):
                del self._waiting[event]
                self._give(delivery, size)
                event.set()

    def _give(self, delivery: Delivery, size: int) -> None:
        self._num_grants += 1
        self._turns.put(delivery.owner, self._num_grants)
        delivery.reserved = max(0, size - delivery.unread)
        self.hold(delivery, size)

    async def watch(self) -> None:
        """Check all connections periodically until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Forget connections without unread bytes; cut off clients that read too slowly."""
        for transport, delivery in list(self._open.items()):
            delivery.look(now)
            has_more = delivery.reserved and not transport.is_closing()
            if not (delivery.is_open or delivery.unread or has_more):
                self.hold(delivery, 0)
                del self._open[transport]
            elif now - delivery.marked >= self._window:
                if delivery.taken - delivery.taken_at_mark < self._min_read_rate * self._window:
                    self.cut(delivery, f"{delivery.unread} bytes unread")
                delivery.mark(now)
        if self._waiting or self._capacity.held > 3 * self._capacity.total // 4:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        """Cut off the slowest client of the tenant that holds most, unless it will finish within the window."""
        owner = self._capacity.largest_holder()
        judged = [
            delivery
            for delivery in self._open.values()
            if delivery.owner == owner and delivery.unread and now - delivery.marked >= PRESSURE_SECONDS
        ]
        slowest = max(judged, key=lambda delivery: delivery.unread / _rate(delivery, now), default=None)
        if slowest is not None and slowest.unread / _rate(slowest, now) > self._window:
            self.cut(slowest, f"{slowest.unread} bytes unread")

    def cut(self, delivery: Delivery, reason: str) -> None:
        """Close the connection of a client that reads too slowly. reason: its sign, for the log."""
        log.warning("a client of %s reads too slowly: %s", delivery.owner, reason)
        self._metrics.slow_reader_cut()
        # The abort cancels a running handler, so the request is settled as if its client had left.
        delivery.transport.abort()
        self.hold(delivery, 0)

    def has_room(self, delivery: Delivery, size: int) -> bool:
        """Return whether the delivery may hold `size` bytes.

        A tenant with other unread answers leaves as much free as it then holds, so that two tenants leave room for a
        third one's answer.
        """
        more, has_others = size - delivery.held, self._capacity.held_by(delivery.owner) > delivery.held
        return more <= 0 or self._capacity.has_room(delivery.owner, more, leaves_room=has_others)

    def _hold_for(self, delivery: Delivery, owner: str) -> None:
        """Move a connection's held bytes to the owner of its next request."""
        held = delivery.held
        self.hold(delivery, 0)
        delivery.owner = owner
        self.hold(delivery, held)


DELIVERIES = web.AppKey("deliveries", Deliveries)


def _rate(delivery: Delivery, now: float) -> float:
    """Return the bytes a second that the client has read since the mark, at least 1."""
    return max(1.0, (delivery.taken - delivery.taken_at_mark) / max(now - delivery.marked, 0.001))


def make_deliveries(settings: Settings, metrics: Metrics) -> Deliveries:
    return Deliveries(
        metrics,
        reader_bytes=settings.reader_buffer_bytes,
        total_bytes=settings.answer_memory_bytes,
        min_read_rate=settings.min_read_rate,
        window=settings.slow_reader_seconds,
    )
