"""Stalls that `benchmarks.hostile` measures are those of the gateway, not those of its own process."""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from benchmarks.hostile.place import Place
from benchmarks.hostile.watch import Seen, Watch
from testing.ports import free_port

SECONDS = 0.4
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """A server in a thread of its own. before_answer: calls for that thread to make, once, before its next answer."""

    def __init__(self) -> None:
        self.port, self.before_answer = free_port(), deque[Callable[[], object]]()
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._ends, self._listens = asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        assert self._listens.wait(30)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join()
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
        self._listens.set()
        await self._ends.wait()
        server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=30)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while await reader.readuntil(b"\r\n\r\n"):
                    while self.before_answer:
                        self.before_answer.popleft()()
                    writer.write(ANSWER)
        finally:
            self._connections.remove(task)
            writer.close()


async def observed(server: Server, folder: Path, *, own: bool) -> Seen:
    """Return what is seen during a stall of the server, or of the observer's own loop while it awaits an answer."""
    log = folder / "gateway.log"
    log.touch()
    url = f"http://127.0.0.1:{server.port}"
    watch = Watch(Place(url, "", "", os.getpid(), "redis://127.0.0.1:1", folder, folder, log))
    over = asyncio.Event()
    observing = asyncio.create_task(watch.observe(over))
    await asyncio.sleep(0.3)
    begun, stall = asyncio.Event(), partial(time.sleep, SECONDS)
    in_own_loop = asyncio.get_running_loop().call_soon_threadsafe
    server.before_answer += [partial(in_own_loop, begun.set), partial(in_own_loop, stall) if own else stall]
    await asyncio.wait_for(begun.wait(), 60)
    await asyncio.sleep(2 * SECONDS)
    over.set()
    seen = await observing
    watch.close()
    assert not seen.failures
    return seen


@pytest.mark.usefixtures("starts_servers")
async def test_a_stall_of_the_observer_is_none_of_the_gateway(tmp_path: Path):
    server = Server()
    with server.running():
        deadline = time.monotonic() + 60
        while True:
            of_server = await observed(server, tmp_path, own=False)
            of_observer = await observed(server, tmp_path, own=True)
            assert [stall for stall in of_observer.own if stall.held > SECONDS / 2]
            # On a busy machine the observer may stall during the server's stall, and the server be delayed too.
            if of_server.stall > SECONDS - 0.1 and of_observer.stall < SECONDS / 2:
                break
            assert time.monotonic() < deadline, (of_server, of_observer)
