"""The process of an engine: from its flags to its exit code, with what signals do to it."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from adapters.store import Store
from engine.config import ConfigError, EngineConfig
from engine.model.weights import Progress
from engine.server.access import is_loopback
from engine.server.announcing import announcing
from engine.server.app import Server, listening
from engine.tokenizer import TokenizerError
from engine.tracing import TracingError, start_tracing

logger = logging.getLogger(__name__)


async def serve(
    server: Server,
    host: str,
    port: int,
    ready: Callable[[int], None],
    progress: Progress | None,
    announce: Callable[[int], AbstractAsyncContextManager[None]],
) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code; a second one ends the drain. `ready` is told the port
    once the model is loaded, and `announce(port)` entered; it is left before the drain begins."""
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
    try:
        async with listening(server, host, port) as bound_port:
            try:
                await server.start(progress)
                if not stop.is_set():
                    ready(bound_port)
                async with announce(bound_port):
                    await stop.wait()
            finally:
                await server.stop()
    except (ConfigError, TokenizerError, OSError) as exc:
        print(f"loraplex engine: {exc}", file=sys.stderr)
        return 1
    return 0


def run(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    adapter_store: Store | None = None,
    internal_token: str | None = None,
    lora_modules: Mapping[str, str] | None = None,
    max_waiting: int = 1024,
    drain_s: float = 30.0,
    tool_call_parser: str | None = None,
    finished_file: Path | None = None,
    api_keys: Sequence[str] = (),
    access_log: bool = False,
    gateways: Sequence[str] = (),
    advertise_url: str | None = None,
    ready: Callable[[int], None] | None = None,
    progress: Progress | None = None,
) -> int:
    """`loraplex engine`: the exit code, 0 after a clean stop, 1 with one line on stderr for what cannot be served.

    gateways: those to announce the engine to, as at `advertise_url`; None: where it listens.
    """
    try:
        tracing = start_tracing("loraplex-engine")
    except TracingError as error:
        raise ConfigError(error.field, error.message) from error
    server = Server(
        config,
        adapter_store=adapter_store,
        internal_token=internal_token,
        lora_modules=lora_modules,
        max_waiting=max_waiting,
        drain_s=drain_s,
        tool_call_parser=tool_call_parser,
        finished_file=finished_file,
        tracing=tracing,
        api_keys=api_keys,
        access_log=access_log,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if server.access.is_open and not is_loopback(host):
        logger.warning("anyone who reaches %s may use this engine: set --api-key or LORAPLEX_INTERNAL_TOKEN", host)

    def announce(bound_port: int) -> AbstractAsyncContextManager[None]:
        own = advertise_url or f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
        return announcing(gateways, own, internal_token)

    def settled(bound_port: int) -> None:
        # No full collection walks over what stays for good: a tenth of a second in which no stream moves.
        gc.collect()
        gc.freeze()
        if ready is not None:
            ready(bound_port)

    try:
        return asyncio.run(serve(server, host, port, settled, progress, announce))
    finally:
        if tracing is not None:
            tracing.close()
