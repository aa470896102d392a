"""Connections of one client that arrive at once do not hold up another client's."""

import asyncio
import contextlib
import errno
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop
from aiohttp import web

from gateway.process import listening as listening_module
from gateway.process.listening import BACKLOG, STARTS_PER_ADDRESS, FairListener, FairSite

NOISY, QUIET = "127.0.0.2", "127.0.0.1"
BURST = 300
LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@contextlib.asynccontextmanager
async def listening(started: list[str]) -> AsyncIterator[tuple[web.AppRunner, int]]:
    """Serve on a free port. started: gets the client's address of each connection that starts."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    server: Any = runner.server
    made = server.connection_made

    def connection_made(handler: Any, transport: asyncio.Transport) -> None:
        started.append(transport.get_extra_info("peername")[0])
        made(handler, transport)

    server.connection_made = connection_made
    await FairSite(runner, "127.0.0.1", 0, is_shared=False).start()
    try:
        yield runner, runner.addresses[0][1]
    finally:
        await runner.cleanup()


def connect(address: str, port: int) -> socket.socket:
    """Connect without an iteration of the event loop: the system completes the connection."""
    return socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(address, 0))


async def all_started(started: list[str], number: int) -> None:
    async with asyncio.timeout(20):
        while True:
            if len(started) >= number:
                break
            await asyncio.sleep(0)


def run(make_loop: Callable[[], asyncio.AbstractEventLoop], test: Any) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(test, 60))


@LOOPS
def test_a_clients_connection_does_not_wait_behind_anothers(
    make_loop: Callable[[], asyncio.AbstractEventLoop], starts_servers: None
):
    async def test() -> None:
        started: list[str] = []
        async with listening(started) as (_, port):
            with contextlib.ExitStack() as held:
                for address in [NOISY] * BURST + [QUIET]:
                    held.enter_context(connect(address, port))
                await all_started(started, BURST + 1)
        assert Counter(started) == {NOISY: BURST, QUIET: 1}
        # It is accepted with the first ones, and then starts in the next iteration.
        assert started.index(QUIET) < BURST // 3

    assert BURST < BACKLOG
    run(make_loop, test())


@LOOPS
def test_an_iteration_starts_few_connections_of_an_address(
    make_loop: Callable[[], asyncio.AbstractEventLoop], starts_servers: None
):
    async def test() -> None:
        started: list[str] = []
        async with listening(started) as (_, port):
            with contextlib.ExitStack() as held:
                for _ in range(40):
                    held.enter_context(connect(NOISY, port))
                most = before = 0
                async with asyncio.timeout(20):
                    while len(started) < 40:
                        await asyncio.sleep(0)
                        most, before = max(most, len(started) - before), len(started)
        assert most <= STARTS_PER_ADDRESS

    run(make_loop, test())


async def test_connections_that_arrived_are_served_after_the_listener_closes(starts_servers: None):
    started: list[str] = []
    async with listening(started) as (runner, port):
        [site] = runner.sites
        listener: Any = site._server
        assert isinstance(listener, FairListener)
        with contextlib.ExitStack() as held:
            clients = [held.enter_context(connect(NOISY, port)) for _ in range(20)]
            assert listener.is_busy
            await asyncio.wait_for(listener.all_started(), 20)
            assert len(started) == 20
            await site.stop()
            for client in clients:
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert b"404" in await asyncio.to_thread(client.recv, 1000)
        with pytest.raises(ConnectionRefusedError):
            connect(QUIET, port)


async def test_connections_wait_while_no_descriptor_is_free(starts_servers: None):
    started: list[str] = []
    async with listening(started) as (_, port):
        with contextlib.ExitStack() as held:
            for _ in range(8):
                held.enter_context(connect(NOISY, port))
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
            try:
                await asyncio.sleep(0.2)
                assert not started
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await all_started(started, 8)


async def test_connections_of_an_address_beyond_its_limit_are_closed_and_another_client_starts_soon(
    monkeypatch: pytest.MonkeyPatch, starts_servers: None
):
    limit = 32
    monkeypatch.setattr(listening_module, "MAX_WAITING", 2 * limit)
    monkeypatch.setattr(listening_module, "WAITING_PER_ADDRESS", limit)
    started: list[str] = []
    async with listening(started) as (_, port):
        with contextlib.ExitStack() as held:
            noisy = [held.enter_context(connect(NOISY, port)) for _ in range(BURST)]
            held.enter_context(connect(QUIET, port))
            await all_started(started, limit)
            assert QUIET in started[:limit]
            # The last ones were closed, and the first one is served.
            assert await asyncio.to_thread(noisy[-1].recv, 1) == b""
            noisy[0].sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"404" in await asyncio.to_thread(noisy[0].recv, 1000)


async def test_families_that_the_system_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch, starts_servers: None):
    class WithoutIPv6(socket.socket):
        def __init__(self, family: int = -1, *others: Any, **named: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *others, **named)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    async with listening([]) as (runner, _):
        # The unspecified host has an address of each family.
        await FairSite(runner, "", 0, is_shared=False).start()
        [_, unspecified] = runner.addresses
        assert unspecified[0] == "0.0.0.0"
        with pytest.raises(OSError, match="not supported"):
            await FairSite(runner, "::1", 0, is_shared=False).start()


async def test_a_taken_port_is_an_error(starts_servers: None):
    async with listening([]) as (runner, port):
        with pytest.raises(OSError, match="in use"):
            await FairSite(runner, "127.0.0.1", port, is_shared=False).start()
