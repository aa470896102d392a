"""The engine's HTTP server: its parts in the order of their creation, the routes, and its life from bind to drain.

The port is bound first; until the model is loaded, every route that needs it answers 503.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from adapters.open_store import open_store
from engine.answering.caller import Caller
from engine.answering.completions import GenerationRoutes
from engine.answering.errors import IS_INTERNAL, ApiError
from engine.answering.in_flight import InFlight
from engine.answering.model_names import ModelRegistry
from engine.answering.request_threads import RequestThreads
from engine.answering.throughput_log import log_throughput
from engine.answering.tool_calls.table import FORMATS, format_of
from engine.answering.usage_log import UsageLog
from engine.config import EngineConfig, ServerConfig
from engine.core.client import CoreClient
from engine.core.messages import LoadModel
from engine.core.process import open_link
from engine.errors import EngineUnavailable
from engine.http.access import Access, request_lines, say_request_id
from engine.http.description import engine_description
from engine.http.error_boundary import error_boundary
from engine.http.routes import EngineRoutes, json_response
from engine.http.service_reports import ServiceReports
from engine.http.state_feed import StateFeed
from engine.http.trusted_headers import read_caller
from engine.metrics.metrics import Metrics
from engine.probing.base_digest import base_digest
from engine.probing.prober import Prober
from engine.progress import StartProgress, describe
from engine.sampling_defaults import OPENAIS, read_sampling_defaults
from engine.scheduling.request import RequestOutput
from wire.errors import ConfigError
from wire.http_requests import guard_requests
from wire.responses import HealthStatus, Version
from wire.telemetry.http_log import http_logger
from wire.telemetry.spans import Tracing, trace_requests
from wire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
GENERATING_ROUTES = ("/v1/completions", "/v1/chat/completions")
# Time for clients to receive the end of their answers, after all requests have ended.
LAST_WORDS_S = 5.0


class Server:
    """HTTP server of one engine. `start` loads the engine, `stop` drains and closes it; the app may be served before
    and after.
    """

    def __init__(
        self, config: EngineConfig, server: ServerConfig | None = None, *, tracing: Tracing | None = None
    ) -> None:
        """Create a server without loading the model. Raises ConfigError."""
        self._config = config
        self._server_config = server = server or ServerConfig()
        _check_store(server)
        self.access = Access(server.internal_token, server.api_keys)
        self._drain_seconds = server.drain_seconds
        self._metrics = Metrics(server.metrics_names)
        self._throughput_log: asyncio.Task[None] | None = None
        self._core: CoreClient | None = None
        self._in_flight: InFlight | None = None
        self._routes: EngineRoutes | None = None
        self._generation: GenerationRoutes | None = None
        self._usage_log: UsageLog | None = None
        self._states: StateFeed | None = None
        self._threads = RequestThreads()
        self._tracing = tracing
        self._draining = False
        self._phase = "starting"

    def make_app(self) -> web.Application:
        traced = (
            []
            if self._tracing is None
            else [trace_requests(self._tracing, GENERATING_ROUTES.__contains__, self.access.is_internal)]
        )
        app = web.Application(
            middlewares=[
                *traced,
                request_lines(access_log=self._server_config.access_log),
                error_boundary,
                self.access.authenticate,
            ],
            client_max_size=MAX_BODY_BYTES,
        )
        app.on_response_prepare.append(say_request_id)
        app.router.add_post("/v1/completions", self._generating(GenerationRoutes.completions))
        app.router.add_post("/v1/chat/completions", self._generating(GenerationRoutes.chat))
        app.router.add_get("/v1/models", self._route(EngineRoutes.list_models))
        app.router.add_get("/v1/models/{name:.+}", self._route(EngineRoutes.one_model))
        app.router.add_post("/tokenize", self._route(EngineRoutes.tokenize))
        app.router.add_post("/detokenize", self._route(EngineRoutes.detokenize))
        app.router.add_post("/v1/load_lora_adapter", self._route(EngineRoutes.load_adapter))
        app.router.add_post("/v1/unload_lora_adapter", self._route(EngineRoutes.unload_adapter))
        app.router.add_get("/state", self._route(EngineRoutes.state))
        # The usage log keeps the path of earlier releases, because gateways ask engines of another release too.
        app.router.add_get("/finished", self._route(EngineRoutes.finished_requests))
        app.router.add_post("/allowances", self._route(EngineRoutes.raise_allowance))
        app.router.add_post("/service", self._route(EngineRoutes.add_service))
        app.router.add_post("/probe", self._route(EngineRoutes.probe))
        app.router.add_post("/prefetch", self._route(EngineRoutes.prefetch))
        app.router.add_post("/pins", self._route(EngineRoutes.pin))
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/readyz", self._health)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._render_metrics)
        app.router.add_get("/openapi.json", self._describe)
        return app

    async def start(self, progress: StartProgress | None = None) -> None:
        """Load tokenizer, model and named adapters. Raises ConfigError, TokenizerError or OSError."""
        try:
            self._usage_log = UsageLog(self._server_config.usage_log)
        except (ValueError, OSError) as error:
            raise ConfigError("usage_log", str(error)) from error
        from_model = self._config.generation_config == "auto"
        defaults = read_sampling_defaults(Path(self._config.model)) if from_model else OPENAIS
        # Before the weights, whose reading may take minutes.
        tokenizer = await asyncio.to_thread(load_tokenizer, self._config)
        core = await self._load_core(progress)
        await core.prepare_grammars(tokenizer.to_json())
        self._in_flight = InFlight(
            core, max_requests=core.facts.max_num_seqs + self._server_config.max_waiting, on_step=self._stepped
        )
        name = self._config.served_model_name or Path(self._config.model).name.removesuffix(".gguf")
        models = ModelRegistry(name, core, self._in_flight, self._metrics.adapter_load_failures.inc)
        for lora_name, path in self._server_config.lora_modules:
            try:
                await models.load(lora_name, str(path))
            except ApiError as exc:
                raise ConfigError("lora_modules", f"{lora_name}: {exc}") from exc
        facts = core.facts
        parser = self._server_config.tool_call_parser
        self._generation = GenerationRoutes(
            tokenizer,
            facts,
            self._in_flight,
            models,
            self._metrics,
            format_of(tokenizer.tool_template) if parser is None else FORMATS[parser],
            self._usage_log,
            defaults,
            self._threads,
        )
        digest = await asyncio.to_thread(base_digest, Path(self._config.model))
        self._states = StateFeed(core, models, self._usage_log, digest)
        self._throughput_log = asyncio.create_task(log_throughput(core))
        prober = Prober(facts, self._in_flight, models, digest)
        self._routes = EngineRoutes(
            tokenizer,
            core,
            models,
            self._metrics,
            self._usage_log,
            self._states,
            prober,
            ServiceReports(),
            self._threads,
        )

    async def _load_core(self, progress: StartProgress | None) -> CoreClient:
        """Start the core and load the model. Raises ConfigError or OSError."""
        server = self._server_config
        self._core = core = CoreClient(
            load_ended=self._metrics.host_load_ended, progress=partial(self._note_progress, progress)
        )
        load = LoadModel(self._config, server.adapter_store, str(server.adapter_cache), server.adapter_cache_bytes)
        link = await open_link(core, self._config)
        if link.pid is not None:
            self._metrics.watch_core(link.pid)
        await core.load(link, load)
        return core

    def _note_progress(self, progress: StartProgress | None, phase: str, done: int, total: int) -> None:
        self._phase = describe(phase, done, total)
        if progress is not None:
            progress(phase, done, total)

    async def measure_roofline(self) -> None:
        """Measure the device's limits, for the steps' reports. Call it after `start`, before the first request."""
        assert self._core is not None
        await self._core.measure_roofline()

    async def stop(self) -> None:
        """Refuse new requests, wait for those in flight, then free everything."""
        self._draining = True
        if self._states is not None and (self._core is None or self._core.failure is None):
            # The end of a failed engine is a death, and no gateway may take it for an intended one.
            self._states.drain()
        if self._in_flight is not None:
            await self._in_flight.close(self._drain_seconds)
        elif self._core is not None:
            await self._core.close()
        if self._throughput_log is not None:
            self._throughput_log.cancel()
            await asyncio.wait([self._throughput_log])
        if self._states is not None:
            await self._states.close()
        if self._usage_log is not None:
            self._usage_log.close()

    def say_draining(self) -> None:
        num_requests = 0 if self._in_flight is None else self._in_flight.number
        logger.info("draining %d requests, up to %g s", num_requests, self._drain_seconds)

    def stop_waiting(self) -> None:
        """Make a running or later `stop` abort the requests in flight at once."""
        self._drain_seconds = 0.0
        if self._draining and self._in_flight is not None:
            self._in_flight.stop_waiting()

    def _stepped(self, seconds: float, outputs: Sequence[RequestOutput]) -> None:
        """Record a step."""
        self._metrics.observe_step(seconds, outputs)
        if self._states is not None:
            self._states.stepped()

    def _route(self, handler: Callable[[EngineRoutes, web.Request], Awaitable[web.StreamResponse]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if self._routes is None:
                raise EngineUnavailable("The model is loading.")
            return await handler(self._routes, request)

        return handle

    def _generating(
        self, handler: Callable[[GenerationRoutes, web.Request, Caller], Awaitable[web.StreamResponse]]
    ) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if self._generation is None or self._states is None:
                raise EngineUnavailable("The model is loading.")
            try:
                caller = read_caller(request.headers, internal=request[IS_INTERNAL])
                if caller.base_digest not in (None, self._states.base_digest):
                    raise EngineUnavailable("This engine serves another base model.")
                return await handler(self._generation, request, caller)
            finally:
                # An aborted request leaves without a step, so no step reports the change.
                self._states.moved()

        return handle

    async def _health(self, _: web.Request) -> web.Response:
        if self._core is not None and self._core.failure is not None:
            return json_response(HealthStatus("unhealthy", self._core.failure), 503)
        if self._draining:
            return json_response(HealthStatus("draining"), 503, {"Retry-After": "1"})
        if self._routes is None:
            return json_response(HealthStatus("loading", self._phase), 503)
        return json_response(HealthStatus("ok"))

    async def _live(self, _: web.Request) -> web.Response:
        """Answer whether a restart would help: 503 once the engine has failed."""
        if self._core is not None and self._core.failure is not None:
            return json_response(HealthStatus("unhealthy", self._core.failure), 503)
        return json_response(HealthStatus("ok"))

    async def failed(self) -> None:
        """Return once the engine has failed; `start` must have ended."""
        assert self._in_flight is not None
        await self._in_flight.core_failed.wait()

    async def _version(self, _: web.Request) -> web.Response:
        return json_response(Version(version("loraplex")))

    async def _describe(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(engine_description()), content_type="application/json")

    async def _render_metrics(self, _: web.Request) -> web.Response:
        if self._routes is not None:
            await self._routes.update_gauges()
        return web.Response(
            body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


@asynccontextmanager
async def listening(server: Server, host: str, port: int) -> AsyncIterator[int]:
    """Serve the app and yield the port, which the system chooses for port 0. Raises OSError if it cannot be bound.

    A handler is cancelled when its client leaves, which aborts the request's sequences.
    """
    runner = web.AppRunner(
        server.make_app(),
        handler_cancellation=True,
        access_log=None,
        logger=http_logger("engine.http"),
        auto_decompress=False,
        shutdown_timeout=LAST_WORDS_S,
    )
    await runner.setup()
    guard_requests(runner)
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the configured tokenizer, or the model's own. Raises TokenizerError, ConfigError."""
    path = Path(config.model)
    if not path.exists():
        raise ConfigError("model", f"no such folder: {path}")
    if config.tokenizer is not None or path.is_dir():
        return Tokenizer.from_dir(config.tokenizer or path)
    from engine.model.gguf.tokenizer import read_tokenizer  # a heavy import that a folder does not need

    return read_tokenizer(path)


def _check_store(server: ServerConfig) -> None:
    """Check the adapter store's URL; the core opens it. Raises ConfigError for a URL of an unknown scheme."""
    url = server.adapter_store
    try:
        if url is not None:
            open_store(url, server.adapter_cache, server.adapter_cache_bytes)
    except ValueError as error:
        raise ConfigError("adapter_store", str(error)) from error
