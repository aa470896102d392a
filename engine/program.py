"""The engine's process: flags, signals and exit code."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from engine.config import EngineConfig, ServerConfig
from engine.http.access import is_loopback
from engine.http.announcing import announcing
from engine.http.app import Server, listening
from engine.progress import StartProgress
from wire.errors import ConfigError
from wire.event_loop import loop_factory, shorten_lock_waits
from wire.garbage import collect_as_usual
from wire.telemetry.start import TracingError, start_tracing
from wire.text.tokenizer import TokenizerError

logger = logging.getLogger(__name__)

# Exit code of an engine that failed while it served, so that its supervisor restarts it.
FAILED_EXIT_CODE = 70
# Time for running requests to receive their error.
FAILED_EXIT_S = 15.0


async def serve(
    server: Server,
    host: str,
    port: int,
    ready: Callable[[int], None],
    progress: StartProgress | None,
    announce: Callable[[int], AbstractAsyncContextManager[None]],
) -> int:
    """Serve until SIGTERM, SIGINT or the engine's failure, and return the exit code.

    A second signal ends the drain. `ready` is called with the port once the model is loaded, then `announce(port)` is
    entered; it is left before the drain begins. After a failure the process ends within `FAILED_EXIT_S`, even if
    something hangs, so that its supervisor starts another.
    """
    stop = asyncio.Event()
    event_loop = asyncio.get_running_loop()

    def end() -> None:
        if stop.is_set():
            server.stop_waiting()
        else:
            stop.set()
            server.say_draining()

    for signum in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(signum, end)
    failed = False
    try:
        async with listening(server, host, port) as bound_port:
            try:
                await server.start(progress)
                await server.measure_roofline()
                if not stop.is_set():
                    ready(bound_port)
                async with announce(bound_port):
                    await _first(stop.wait(), server.failed())
                if not stop.is_set():
                    failed = True
                    _exit_within(FAILED_EXIT_S)
            finally:
                await server.stop()
    except (ConfigError, TokenizerError, OSError) as exc:
        print(f"loraplex engine: {exc}", file=sys.stderr)
        return 1
    return FAILED_EXIT_CODE if failed else 0


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when the first awaitable returns, and cancel the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _exit_within(seconds: float) -> None:
    """End the process after this time even if a thread, a device or a client blocks the exit."""
    timer = threading.Timer(seconds, os._exit, [FAILED_EXIT_CODE])
    timer.daemon = True
    timer.start()


def run(
    config: EngineConfig,
    server_config: ServerConfig,
    *,
    ready: Callable[[int], None] | None = None,
    progress: StartProgress | None = None,
) -> int:
    """Run `loraplex engine` and return its exit code.

    0 after a clean stop, 1 with one line on stderr for a configuration that cannot be served, `FAILED_EXIT_CODE` once
    the engine has failed. ready: called with the port once the engine serves.
    """
    try:
        tracing = start_tracing("loraplex-engine")
    except TracingError as error:
        raise ConfigError(error.field, error.message) from error
    shorten_lock_waits()
    server = Server(config, server_config, tracing=tracing)
    host = server_config.host
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if server.access.is_open and not is_loopback(host):
        logger.warning("any client that reaches %s can use this engine: set --api-key or LORAPLEX_INTERNAL_TOKEN", host)

    def announce(bound_port: int) -> AbstractAsyncContextManager[None]:
        url = server_config.advertise_url or f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        return announcing(server_config.gateways, url, server_config.internal_token, server_config.announce_token)

    def settled(bound_port: int) -> None:
        # A full collection over permanent objects would stall all streams for a tenth of a second.
        collect_as_usual()
        if ready is not None:
            ready(bound_port)

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve(server, host, server_config.port, settled, progress, announce))
    finally:
        if tracing is not None:
            tracing.close()
