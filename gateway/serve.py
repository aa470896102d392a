"""Life cycle of the gateway: bind, signals, drain, worker processes."""

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from gateway.api.access_log import hide_server
from gateway.api.health import MetricsPage
from gateway.api.requests.body_reader import READ_BUFFER_BYTES
from gateway.app import CONNECTIONS, DRAIN, LAG, METRICS, make_app
from gateway.log_format import set_up_logging
from gateway.metrics import Metrics
from gateway.process.background import running
from gateway.process.connections import allow_descriptors
from gateway.process.garbage import collect_when_calm, reduce_pauses
from gateway.process.listening import FairSite
from gateway.process.memory import return_freed_memory
from gateway.process.reads import bound_reads
from gateway.settings import NotUsableNow, Settings
from gateway.workers import Supervisor
from wire.event_loop import loop_factory, shorten_lock_waits
from wire.http_requests import guard_requests
from wire.telemetry.http_log import http_logger

log = logging.getLogger(__name__)

# Maximum number of fields in a request's head, and the size of one. A connection may hold them all before its key is
# verified.
MAX_HEADERS = 64
MAX_HEADER_BYTES = 4096


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Print one JSON line on stdout once the gateway accepts requests.

    Raises SettingsError if it cannot start, NotUsableNow for a port in use or a missing schema.
    """
    set_up_logging(settings.log_format)
    if settings.workers > 1:
        Supervisor(settings, _work, _say_ready).run()
    else:
        _work(settings, None, _say_ready)


def _say_ready(url: str) -> None:
    print(json.dumps({"event": "ready", "gateway": url}), flush=True)


def _work(settings: Settings, parent: int | None, ready: Callable[[str], None]) -> None:
    """Serve in this process. parent: a descriptor that becomes readable when the parent process dies."""
    return_freed_memory()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(settings, parent, ready))


def steady() -> None:
    """Reduce the latency of the slowest requests: full garbage collections skip long-lived objects, and threads return
    the interpreter lock to the event loop sooner.
    """
    reduce_pauses()
    shorten_lock_waits()


async def _serve(settings: Settings, parent: int | None, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    starting, serving = asyncio.timeout(None), False

    def end() -> None:
        if not serving and not stop.is_set():
            starting.reschedule(loop.time())
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, end)
    if parent is not None:
        loop.add_reader(parent, end)
    async with AsyncExitStack() as life:
        try:
            async with starting:
                url = await life.enter_async_context(listening(await make_app(settings), settings, steady))
        except TimeoutError:
            if not starting.expired():
                raise
            log.info("stopped before any request was taken")
            return
        serving = True
        ready(url)
        await stop.wait()
        if parent is not None:
            loop.remove_reader(parent)
        log.info("stopping: no new requests; running ones have %.0f s", settings.shutdown_seconds)


@asynccontextmanager
async def listening(
    app: web.Application, settings: Settings, started: Callable[[], None] = lambda: None
) -> AsyncIterator[str]:
    """Serve the gateway's application on the configured ports; yield its URL and drain on exit.

    started: called when all components run, before the first client can connect.
    """
    # handler_cancellation: when a client leaves, its handler is cancelled, which closes the connection to the engine.
    # keepalive_timeout: limits the wait for a complete head of a request, also for the first one of a connection.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=http_logger("gateway.http"),
        auto_decompress=False,
        # aiohttp waits this long for handlers to end, and as long again before it cancels them.
        shutdown_timeout=settings.shutdown_seconds / 2,
        keepalive_timeout=settings.idle_timeout,
        # Buffer sizes of a connection, for an unread body and for a head.
        read_bufsize=READ_BUFFER_BYTES,
        max_headers=MAX_HEADERS,
        max_field_size=MAX_HEADER_BYTES,
    )
    metrics_runner = web.AppRunner(
        _metrics_app(app[METRICS]), access_log=None, logger=http_logger("gateway.http"), auto_decompress=False
    )
    try:
        await runner.setup()
        guard_requests(runner)
        bound_reads(runner)
        server = runner.server
        assert server is not None
        allow_descriptors(settings.max_connections)
        started()
        app[LAG].explain_from_now()
        shared = settings.workers > 1
        await _bind(runner, "LORAPLEX_PORT", settings.host, settings.port, shared=shared)
        if settings.admin_port is not None:
            await _bind(runner, "LORAPLEX_ADMIN_PORT", settings.host, settings.admin_port, shared=shared)
        if settings.metrics_port is not None:
            await metrics_runner.setup()
            guard_requests(metrics_runner)
            await _bind(metrics_runner, "LORAPLEX_METRICS_PORT", settings.host, settings.metrics_port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        limiter = app[CONNECTIONS]
        async with (
            running(limiter.watch(lambda: server.connections)),
            running(collect_when_calm(lambda: limiter.num_busy)),
        ):
            yield f"http://{host}:{runner.addresses[0][1]}"
        await app[DRAIN].run(runner, settings.shutdown_delay)
        app[DRAIN].end_requests(settings.shutdown_seconds)
    finally:
        # The metrics server stops last, so that a scrape sees the drain.
        await runner.cleanup()
        await metrics_runner.cleanup()


async def _bind(runner: web.AppRunner, field: str, host: str, port: int, *, shared: bool = False) -> None:
    try:
        await FairSite(runner, host, port, is_shared=shared).start()
    except OSError as error:
        raise NotUsableNow(field, f"cannot listen on {host}:{port}: {error.strerror}") from error


def _metrics_app(metrics: Metrics) -> web.Application:
    app = web.Application()
    app.on_response_prepare.append(hide_server)
    app.router.add_get("/metrics", MetricsPage(metrics).get)
    return app
