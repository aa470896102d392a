"""Refused bodies: the gateway answers before it has received the whole body, drops the rest and closes the connection.

A client may read its answer only after it has sent everything, so the rest is received for some seconds, until none
arrives for a second. Receiving 256 KiB takes 0.2 ms of the event loop. At full speed, 500 refused bodies of 8 MiB
stalled the loop for 0.4 s, so each tenant's or address's bodies are dropped at a limited rate.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from aiohttp import hdrs, web

from gateway.caller import CALLER, client_network
from gateway.process.reads import EndQueue, Forwarding
from gateway.sharing.byte_rate import ByteRate

# A body of 8 MiB is dropped within half a second. An owner's bodies take some 1 % of a core.
BYTES_PER_SECOND = 16 * 2**20
# Pause of the client after which its connection is closed. Without it, a client that sends nothing kept its connection
# for aiohttp's `lingering_time` of 10 s.
QUIET_SECONDS = 1.0
# The bytes of all connections go there; nobody reads them.
_DROPPED = memoryview(bytearray(2**18))


class UnreadBodies:
    """The unread rests of refused bodies, by owner: a tenant, or the network of a client without a key."""

    def __init__(self, bytes_per_second: float = BYTES_PER_SECOND) -> None:
        self._rate = ByteRate(bytes_per_second)

    async def close(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Close the connection of a request that is answered before its whole body was received.

        Register it in `app.on_response_prepare`. Further bytes are dropped unparsed while the client reads the answer.
        """
        if request.content.is_eof():
            return
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"
        request.protocol.close()
        transport = request.transport
        if transport is not None:
            # Paused: a loop chooses how it reads when it starts.
            transport.pause_reading()
            reads = transport.get_protocol()
            ends = reads.ends if isinstance(reads, Forwarding) else EndQueue()
            delay = partial(self._rate.delay, _owner())
            transport.set_protocol(_Dropping(request.protocol, ends, transport, delay, request.content.feed_eof))
            transport.resume_reading()


def _owner() -> str:
    """Return the running request's tenant, or the network of a client without one, who may have many addresses."""
    caller = CALLER.get()
    return "" if caller is None else caller.tenant_name or client_network(caller.address)


class _Dropping(Forwarding):
    """The protocol of a connection whose further bytes are dropped.

    handler: the one that still sends the answer, and then waits for the end of the body. delay: returns the seconds
    until the next piece may be received. end: ends the body.
    """

    def __init__(
        self,
        handler: asyncio.Protocol,
        ends: EndQueue,
        transport: asyncio.Transport,
        delay: Callable[[int], float],
        end: Callable[[], None],
    ) -> None:
        super().__init__(handler, _DROPPED, ends)
        self._transport = transport
        self._delay = delay
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._is_paused = False
        self._timer = self._loop.call_later(QUIET_SECONDS, end)

    def buffer_updated(self, nbytes: int) -> None:
        self._transport.pause_reading()
        if not self._is_paused:
            self._is_paused = True
            self._timer.cancel()
            self._timer = self._loop.call_later(self._delay(nbytes), self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        self._timer = self._loop.call_later(QUIET_SECONDS, self._end)
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
