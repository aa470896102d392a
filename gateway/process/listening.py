"""Listening sockets whose new connections start in turn, by client address.

libuv accepts one connection in each iteration of the event loop, in the order of their arrival. Behind 500 connections
of one client, another client's waited for 500 iterations; beyond the system's queue of 128, its client tried again only
after a second. So everything that has arrived is accepted at once, which takes 10 µs each. Accepted sockets wait
unread, and each iteration starts a few of each address. A waiting socket has no objects besides its own, so that
garbage collections stay short.
"""

import asyncio
import contextlib
import logging
import select
import socket
from collections import OrderedDict, deque
from typing import Any

from aiohttp import web

from gateway.caller import client_network

log = logging.getLogger(__name__)

# The system's queue of connections that are not accepted.
BACKLOG = 1024
# Sockets accepted at once, and their maximum number that waits; further ones stay in the system's queue.
ACCEPTED_AT_ONCE, MAX_WAITING = 64, 2048
# Maximum number of waiting sockets of one address; further ones are closed. The clients behind a load balancer or a
# company's gateway share an address, and 1,000 of them may well connect at once.
WAITING_PER_ADDRESS = MAX_WAITING // 2
# Connections that start in one iteration of the event loop: of all addresses, and of one. A start takes 0.3 ms.
STARTS_PER_ITERATION, STARTS_PER_ADDRESS = 8, 1
# Pause after a failed `accept`, such as one without a free descriptor.
PAUSE_SECONDS = 0.1
# Interval of warnings of closed sockets.
WARNING_SECONDS = 60.0


class FairListener:
    """Acceptor of the connections to bound sockets. handler: makes the protocol of each connection.

    It has the parts of `asyncio.Server` that aiohttp's sites use.
    """

    def __init__(self, listeners: list[socket.socket], handler: Any) -> None:
        self.sockets = listeners
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        # Accepted sockets by the client's network. Networks take turns.
        self._waiting: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        self._num_waiting = 0
        self._is_starting = False
        self._starts: set[asyncio.Task[None]] = set()
        self._warns_at = self._loop.time()

    @property
    def is_busy(self) -> bool:
        """Return whether a connection that has arrived has not started."""
        # `select` takes no descriptor above 1023.
        poll = select.poll()
        for listener in self.sockets:
            poll.register(listener, select.POLLIN)
        return bool(self._num_waiting or self._starts or poll.poll(0))

    async def all_started(self) -> None:
        """Wait until all connections that have arrived have started."""
        while True:
            if not self.is_busy:
                return
            await asyncio.sleep(0)

    def listen(self) -> None:
        for listener in self.sockets:
            listener.listen(BACKLOG)
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Stop listening. Accepted connections start nevertheless."""
        for listener in self.sockets:
            self._loop.remove_reader(listener)
            listener.close()
        self.sockets = []

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(min(ACCEPTED_AT_ONCE, MAX_WAITING - self._num_waiting)):
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                log.error("a connection cannot be accepted: %s", error.strerror)
                self._pause(listener, PAUSE_SECONDS)
                break
            self._keep(accepted, client_network(address[0]))
        if self._num_waiting >= MAX_WAITING:
            self._pause(listener, 0.0)
        if self._num_waiting and not self._is_starting:
            self._start_some()

    def _keep(self, accepted: socket.socket, network: str) -> None:
        queue = self._waiting.setdefault(network, deque())
        if len(queue) < WAITING_PER_ADDRESS:
            accepted.setblocking(False)
            queue.append(accepted)
            self._num_waiting += 1
            return
        accepted.close()
        if self._loop.time() >= self._warns_at:
            self._warns_at = self._loop.time() + WARNING_SECONDS
            log.warning("new connections are closed: %d of their address have not started", len(queue))

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._loop.call_later(seconds, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() < 0:
            return
        if self._num_waiting >= MAX_WAITING:
            self._loop.call_soon(self._resume, listener)
        else:
            self._loop.add_reader(listener, self._accept, listener)

    def _start_some(self) -> None:
        """Start connections of the addresses in turn, and the next ones in the next iteration."""
        for network in list(self._waiting)[:STARTS_PER_ITERATION]:
            queue = self._waiting.pop(network)
            for _ in range(min(STARTS_PER_ADDRESS, len(queue))):
                task = self._loop.create_task(self._start(queue.popleft()))
                self._starts.add(task)
                task.add_done_callback(self._starts.discard)
                self._num_waiting -= 1
            if queue:
                self._waiting[network] = queue
        self._is_starting = self._num_waiting > 0
        if self._is_starting:
            self._loop.call_soon(self._start_some)

    async def _start(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._handler, accepted)
        except OSError as error:
            # The client has left.
            log.debug("a connection did not start: %s", error)
            accepted.close()


class FairSite(web.BaseSite):
    """A host and port of a runner. is_shared: whether other processes listen on it too."""

    def __init__(self, runner: web.BaseRunner, host: str, port: int, *, is_shared: bool) -> None:
        super().__init__(runner)
        self._address, self._is_shared = (host, port), is_shared

    @property
    def name(self) -> str:
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Raises OSError if an address cannot be bound."""
        await super().start()
        listeners = await _bind(*self._address, is_shared=self._is_shared)
        listener = FairListener(listeners, self._runner.server)
        listener.listen()
        self._server = listener  # type: ignore[assignment]  # aiohttp uses its `sockets` and `close` only


async def _bind(host: str, port: int, *, is_shared: bool) -> list[socket.socket]:
    """Return sockets that are bound to each of a host's addresses, without the families that the system lacks.

    Raises OSError.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as undone:
        listeners: list[socket.socket] = []
        lacking: OSError | None = None
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listener = socket.socket(family, kind, protocol)
            except OSError as error:
                lacking = error
                continue
            undone.enter_context(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listeners.append(listener)
        if lacking is not None and not listeners:
            raise lacking
        undone.pop_all()
    return listeners
