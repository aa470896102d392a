"""Worker processes of a gateway on one port: started together, restarted when one dies, stopped together.

Each worker listens by itself (SO_REUSEPORT) and the kernel distributes connections among them; they share only Redis
and the database. The parent reserves the port and serves nothing. A worker whose parent has died ends as on SIGTERM.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

from gateway.settings import NotUsableNow, Settings, SettingsError

log = logging.getLogger(__name__)

FIRST_RESTART_SECONDS = 0.1
LAST_RESTART_SECONDS = 10.0
# Time that a worker gets to end, beyond its own drain and shutdown times.
STOP_SECONDS = 60.0

# Beginning of the workers' process names, before their number.
NAME = "gateway-"

# Function that serves until it is stopped. Arguments: the settings, a descriptor that becomes readable when the parent
# dies, and a callback that receives the URL once requests are accepted.
Serve = Callable[[Settings, int, Callable[[str], None]], None]


class Supervisor:
    """Parent of the workers. Raises SettingsError if a worker cannot start at first; later starts are retried."""

    def __init__(self, settings: Settings, serve: Serve, ready: Callable[[str], None]) -> None:
        self._settings = settings
        self._serve = serve
        self._ready = ready
        self._workers: dict[int, ForkProcess] = {}
        self._started: dict[int, float] = {}
        self._restart_seconds = FIRST_RESTART_SECONDS
        self._stopping = False

    def run(self) -> None:
        """Run the workers until SIGTERM or SIGINT; return when every worker has ended."""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        # Only the parent holds the writing end, so the reading end becomes readable when the parent dies.
        self._alive_reader, self._alive_writer = os.pipe()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)
        with reserve_port(self._settings.host, self._settings.port) as reserved:
            port = reserved.getsockname()[1]
            try:
                starting = [self._start(number, port) for number in range(self._settings.workers)]
                urls = [self._until_ready(connection) for connection in starting]
                if urls[0] is not None:
                    self._ready(urls[0])
                while not self._stopping:
                    self._wait()
                    self._restart_dead(port)
            finally:
                self._stop()

    def _on_signal(self, signum: int, frame: object) -> None:
        self._stopping = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"x")

    def _start(self, number: int, port: int) -> Connection:
        """Start a worker. It sends its URL on the connection once it accepts requests, or the error of its start."""
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=self._work, args=(number, port, theirs), name=f"{NAME}{number}")
        process.start()
        theirs.close()
        self._workers[number], self._started[number] = process, time.monotonic()
        return ours

    def _work(self, number: int, port: int, starter: Connection) -> None:
        """Serve in the child process."""
        os.close(self._alive_writer)
        os.close(self._wake_writer)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        metrics_port = self._settings.metrics_port
        own = replace(self._settings, port=port, metrics_port=metrics_port + number if metrics_port else metrics_port)
        try:
            self._serve(own, self._alive_reader, starter.send)
        except SettingsError as error:
            starter.send(error)

    def _until_ready(self, connection: Connection) -> str | None:
        """Return the worker's URL, None if a signal stops the parent first. Raises SettingsError."""
        with connection:
            if connection not in multiprocessing.connection.wait([connection, self._wake_reader]):
                return None
            try:
                answer = connection.recv()
            except EOFError:
                raise NotUsableNow("LORAPLEX_WORKERS", "a worker ended before it took requests; see the log") from None
        if isinstance(answer, str):
            return answer
        raise answer

    def _wait(self) -> None:
        """Wait for a worker's end or a signal."""
        multiprocessing.connection.wait([self._wake_reader, *(worker.sentinel for worker in self._workers.values())])

    def _restart_dead(self, port: int) -> None:
        for number, process in list(self._workers.items()):
            if process.is_alive() or self._stopping:
                continue
            log.error("worker %d (pid %d) exited with code %s", number, process.pid, process.exitcode)
            if time.monotonic() - self._started[number] > LAST_RESTART_SECONDS:
                self._restart_seconds = FIRST_RESTART_SECONDS
            # A signal ends the pause.
            multiprocessing.connection.wait([self._wake_reader], self._restart_seconds)
            if self._stopping:
                return
            self._restart_seconds = min(2 * self._restart_seconds, LAST_RESTART_SECONDS)
            try:
                self._until_ready(self._start(number, port))
            except SettingsError as error:
                # A part that was there at first is away, such as the database. The worker's end wakes `_wait` to retry.
                log.error("worker %d cannot start: %s", number, error)

    def _stop(self) -> None:
        for process in self._workers.values():
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + self._settings.shutdown_delay + self._settings.shutdown_seconds + STOP_SECONDS
        for process in self._workers.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                log.critical("worker %s did not exit in time and was killed", process.name)
                process.kill()
                process.join()


def is_first_worker() -> bool:
    """Return whether this process is the only or the first worker of its gateway, which logs what concerns all."""
    name = multiprocessing.current_process().name
    return not name.startswith(NAME) or name == f"{NAME}0"


def reserve_port(host: str, port: int) -> socket.socket:
    """Return a socket that does not listen but reserves a port (0: any free one) for sockets with SO_REUSEPORT.

    Raises NotUsableNow if the port is in use, with or without SO_REUSEPORT.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = probe.getsockname()[1]
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise NotUsableNow("LORAPLEX_PORT", f"cannot listen on {host}:{port}: {error.strerror}") from error
    return held
