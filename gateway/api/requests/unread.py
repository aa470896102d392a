"""Refused bodies: the gateway answers before it has received the whole body, drops the rest and closes the connection.

A client may read its answer only after it has sent everything, so the rest is received for some seconds. Receiving
256 KiB takes 0.2 ms of the event loop. At full speed, 500 refused bodies of 8 MiB stalled the loop for 0.4 s, so each
tenant's or address's bodies are dropped at a limited rate.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from aiohttp import hdrs, web

from gateway.access.caller import CALLER
from gateway.access.throttle import client_network
from gateway.process.reads import Forwarding

# A body of 8 MiB is dropped within half a second. An owner's bodies take some 1 % of a core.
BYTES_PER_SECOND = 16 * 2**20
MAX_OWNERS = 1000
# The bytes of all connections go there; nobody reads them.
_DROPPED = memoryview(bytearray(2**18))


class UnreadBodies:
    """The unread rests of refused bodies, by owner: a tenant, or the network of a client without a key."""

    def __init__(self, bytes_per_second: float = BYTES_PER_SECOND) -> None:
        self._seconds_each = 1 / bytes_per_second
        # Owner -> time (monotonic) at which its next piece may be received, least recently used first.
        self._next: OrderedDict[str, float] = OrderedDict()

    async def close(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Close the connection of a request that is answered before its whole body was received.

        For `app.on_response_prepare`. Further bytes are dropped unparsed while the client reads the answer.
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
            transport.set_protocol(_Dropping(request.protocol, transport, partial(self._delay, _owner())))
            transport.resume_reading()

    def _delay(self, owner: str, size: int) -> float:
        """Count a received piece. Return the seconds until the next piece of its connection may be received."""
        now = time.monotonic()
        self._next[owner] = max(now, self._next.get(owner, 0.0)) + size * self._seconds_each
        self._next.move_to_end(owner)
        if len(self._next) > MAX_OWNERS:
            self._next.popitem(last=False)
        return self._next[owner] - now


def _owner() -> str:
    """Return the running request's tenant, or the network of a client without one, who may have many addresses."""
    caller = CALLER.get()
    return "" if caller is None else caller.tenant_name or client_network(caller.address)


class _Dropping(Forwarding):
    """The protocol of a connection whose further bytes are dropped. handler: the one that still sends the answer."""

    def __init__(self, handler: asyncio.Protocol, transport: asyncio.Transport, delay: Callable[[int], float]) -> None:
        super().__init__(handler, _DROPPED)
        self._transport = transport
        self._delay = delay
        self._resuming: asyncio.TimerHandle | None = None

    def buffer_updated(self, nbytes: int) -> None:
        self._transport.pause_reading()
        if self._resuming is None:
            self._resuming = asyncio.get_running_loop().call_later(self._delay(nbytes), self._resume)

    def _resume(self) -> None:
        self._resuming = None
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        super().connection_lost(exc)
