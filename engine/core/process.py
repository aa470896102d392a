"""Links to a core: in a process of its own, or in a thread of this process."""

import asyncio
import logging
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, cast

from engine.config import CoreMode, EngineConfig
from engine.core.client import CoreClient, Link
from engine.core.frames import Frames, head
from kernels.devices import kind_of

if TYPE_CHECKING:
    from engine.core.service import CoreService

logger = logging.getLogger(__name__)

CHILD = "engine.core.child"
# Time for the process to end after its engine has closed; its memory may be large.
EXIT_SECONDS = 10.0


def core_mode(config: EngineConfig) -> CoreMode:
    """Return the configured mode of the core, or the device's default.

    On a GPU the host's work limits the rate of steps, so front and core run in two processes, each with its own
    interpreter lock. The CPU is as fast in both modes (docs/perf/2026-11-23-host-share.md), and one process needs less
    memory.
    """
    if config.engine_core_mode is not None:
        return config.engine_core_mode
    return "thread" if kind_of(config.device).is_host else "process"


async def open_link(core: CoreClient, config: EngineConfig) -> Link:
    """Start a core in its mode. Raises OSError."""
    return await InProcess.open(core) if core_mode(config) == "process" else InThread(core)


class InThread:
    """A core whose engine steps in a thread of this process."""

    service: "CoreService"
    pid = None

    def __init__(self, core: CoreClient) -> None:
        from engine.core.service import CoreService  # loads torch

        event_loop = asyncio.get_running_loop()

        def to_front(frame: bytes) -> None:
            event_loop.call_soon_threadsafe(core.receive, frame)

        self.service = CoreService(to_front)

    def send(self, frame: bytes) -> None:
        self.service.receive(frame)

    async def close(self) -> None:
        pass


class InProcess(asyncio.Protocol):
    """A core in a child process. Create it by `open`. pid: the child's process id."""

    def __init__(self, core: CoreClient, child: subprocess.Popen[bytes]) -> None:
        self._core, self._child = core, child
        self._frames = Frames()
        self._closing = False
        self._ended: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, core: CoreClient) -> "InProcess":
        """Start the process. Raises OSError."""
        child, connection = _spawn()
        event_loop = asyncio.get_running_loop()
        _, link = await event_loop.create_unix_connection(lambda: cls(core, child), sock=connection)
        return link

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, frame: bytes) -> None:
        self._transport.write(head(frame) + frame)

    async def close(self) -> None:
        self._closing = True
        # The child ends when its socket does.
        self._transport.close()
        try:
            await asyncio.to_thread(self._child.wait, EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the core did not end within %g s and is killed", EXIT_SECONDS)
            self._child.kill()
            await asyncio.to_thread(self._child.wait)
        if self._ended is not None:
            await self._ended

    # Events of the socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._core.receive(frame)

    def connection_lost(self, _: Exception | None) -> None:
        if not self._closing:
            self._core.lost()
            self._ended = asyncio.get_running_loop().create_task(self._report_end())

    async def _report_end(self) -> None:
        """Log the process's exit status or signal, because a killed process cannot log it itself."""
        status = await asyncio.to_thread(self._child.wait)
        reason = f"by signal {-status}" if status < 0 else f"with status {status}"
        logger.error("the engine failed: its core's process %d ended %s", self._child.pid, reason)


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process. Return it and this side of the socket, whose other side only the process has."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", CHILD, str(theirs.fileno())]
        return subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL), ours
