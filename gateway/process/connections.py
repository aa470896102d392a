"""Limit of open connections, and the end of those whose client has left.

A connection belongs to the tenant of its newest request; until a key has been verified on it, it is anonymous. Each
tenant may hold half of the connections, and all anonymous ones together a quarter. Beyond a share or the total, the
connection that has been idle longest is closed, so a new client can always connect.

A read shows that a client has left. While a request waits with an unread body, its connection is not read, so the
request would wait to the end, and hold memory, for nobody. Such connections are therefore examined regularly.
"""

import asyncio
import fcntl
import logging
import os
import resource
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.caller import CALLER, Caller
from gateway.errors import Handler
from gateway.metrics import Metrics
from gateway.process.listening import MAX_WAITING

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
# Event of a connection whose client sends nothing more. Only Linux has it; elsewhere a connection ends after its wait.
CLIENT_LEFT = getattr(select, "POLLRDHUP", 0)
# Owner under which connections without a verified key are counted, and owner of operators' connections.
KEYLESS, OPERATOR = "", "\0operator"


# Descriptors for everything else: connections that have not started, engines, Redis, databases, uploads.
OTHER_DESCRIPTORS = 1024 + MAX_WAITING


def allow_descriptors(connections: int) -> None:
    """Raise the limit of open files, within the hard one, and grow the descriptor table for `connections`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            log.warning(
                "the limit of open files is %d, but LORAPLEX_MAX_CONNECTIONS=%d needs %d", most, connections, wanted
            )
            wanted = most
    _grow_table(wanted)


def _grow_table(size: int) -> None:
    """Grow the descriptor table to `size` now.

    Linux doubles a process's table when it is full, and the call that fills it, such as `accept`, waits for an RCU
    grace period: 7 to 20 ms. The first burst of 500 connections stalled the event loop four times.
    """
    # It is only faster with it, so a refusal (memory of the container, another system's limit) is no error.
    with suppress(OSError), open(os.devnull) as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, size - 1))


@dataclass(slots=True)
class _Use:
    """Newest request of a connection. since: when it began or ended, or when the connection was first seen."""

    since: float = field(default_factory=time.monotonic)
    caller: Caller | None = None
    is_busy: bool = False

    @property
    def owner(self) -> str:
        if self.caller is None:
            return KEYLESS
        return OPERATOR if self.caller.is_operator else self.caller.tenant_name or KEYLESS


class ConnectionLimiter:
    """Open connections of one process. limit: their maximum number."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._uses: dict[Any, _Use] = {}
        metrics.watch_connections(lambda: len(self._uses))

    @property
    def num_busy(self) -> int:
        """Return the number of connections with a running request."""
        return sum(use.is_busy for use in self._uses.values())

    def middleware(self) -> Middleware:
        """Return the middleware that records each connection's tenant.

        It goes inside the middleware of gateway/api/access_log.py.
        """

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            use = self._uses[request.protocol] = _Use(caller=CALLER.get(), is_busy=True)
            try:
                return await handler(request)
            finally:
                use.is_busy, use.since = False, time.monotonic()

        return middleware

    async def watch(self, opened: Callable[[], Sequence[Any]]) -> None:
        """Check the server's connections until cancelled. Run it as a task."""
        while True:
            connections = opened()
            for abandoned in _abandoned(connections):
                abandoned.transport.abort()
            self.look(connections)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self, opened: Sequence[Any]) -> None:
        """Close the connections beyond a share or the total."""
        self._uses = {connection: self._uses.get(connection) or _Use() for connection in opened}
        by_owner: dict[str, list[Any]] = {}
        for connection, use in self._uses.items():
            by_owner.setdefault(use.owner, []).append(connection)
        left = len(self._uses)
        shares = {KEYLESS: self._limit // 4, OPERATOR: self._limit}
        for owner, held in by_owner.items():
            more = len(held) - shares.get(owner, self._limit // 2)
            if more > 0:
                self._close(held, more)
                left -= more
        while left > self._limit:
            held = max(by_owner.values(), key=len)
            more = min(left - self._limit, max(1, len(held) // 2))
            self._close(held, more)
            left -= more

    def _close(self, held: list[Any], number: int) -> None:
        """Close `number` connections: idle ones first, the longest idle before the others."""
        held.sort(key=lambda connection: (self._uses[connection].is_busy, self._uses[connection].since))
        for connection in held[:number]:
            if connection.transport is not None:
                connection.transport.abort()
            self._metrics.connection_closed()
        del held[:number]


def _abandoned(connections: Iterable[Any]) -> Iterator[Any]:
    """Yield the connections that are not read at present and whose client has closed them."""
    poll, unread = select.poll(), {}
    for connection in connections:
        transport = connection.transport
        if transport is not None and not transport.is_closing() and not transport.is_reading():
            descriptor = transport.get_extra_info("socket").fileno()
            unread[descriptor] = connection
            poll.register(descriptor, CLIENT_LEFT)
    for descriptor, _ in poll.poll(0):
        yield unread[descriptor]
