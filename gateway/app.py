"""Application of the gateway: its resources in start order, its middlewares and its routes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from adapters.manifest import BaseShape
from adapters.store import open_store
from gateway.access.auth import Authenticator
from gateway.access.credentials import StrongSecrets
from gateway.access.throttle import FailedLogins
from gateway.api.access_log import add_request_id, hide_server, observe
from gateway.api.adapters import AdapterIntake, Adapters, served, upload_rules
from gateway.api.admin.audit import AdminAudit
from gateway.api.admin.keys import AdminKeys
from gateway.api.admin.prices import AdminPrices
from gateway.api.admin.routes import Admin
from gateway.api.admin.tenants import AdminTenants
from gateway.api.admission import Admission
from gateway.api.completions import Completions
from gateway.api.dashboard import Dashboard
from gateway.api.delivery import Deliveries
from gateway.api.engines import Engines
from gateway.api.health import Health, MetricsPage
from gateway.api.idempotency import Idempotency
from gateway.api.models import Models
from gateway.api.requests.fields import BODY_TIMEOUT
from gateway.api.requests.memory import BODY_MEMORY, BodyMemory
from gateway.api.requests.pieces import close_unread
from gateway.api.requests.prompts import PromptReader
from gateway.api.requests.query import known_parameters
from gateway.api.usage import Usage
from gateway.billing.account import Accounting
from gateway.billing.engine_counts import FinishedClient
from gateway.billing.journal import Journal, journal_folder
from gateway.billing.ledger import Ledger
from gateway.billing.past import UsagePast
from gateway.billing.recovery import Abandoned
from gateway.billing.stream import UsageStream
from gateway.billing.writer import UsageWriter
from gateway.errors import error_boundary
from gateway.fleet.addresses import ANNOUNCED
from gateway.fleet.client import EngineClient, new_session
from gateway.fleet.discovery import Announcements, Discovery
from gateway.fleet.dispatch import Fleet
from gateway.fleet.probe import Probe
from gateway.fleet.quarantine import Quarantine
from gateway.fleet.queue import Gate
from gateway.fleet.registry import Registry
from gateway.fleet.shared_deaths import SharedDeaths
from gateway.fleet.vllm.adapters import VllmAdapters
from gateway.fleet.vllm.recent_uses import RecentUses
from gateway.metrics import Metrics
from gateway.process.admin_port import keep_off_public_port
from gateway.process.background import running
from gateway.process.connections import Connections
from gateway.process.drain import Drain
from gateway.process.loop_lag import LoopLag
from gateway.quota.fallback import parse_fallback
from gateway.quota.quota import Quota
from gateway.records.audit import Audit
from gateway.records.catalog import Catalog
from gateway.records.changes import TRUST_SECONDS, Changes
from gateway.records.database import Database
from gateway.records.housekeeping import Housekeeping
from gateway.records.keys import Keys
from gateway.records.prices import PriceList, Prices
from gateway.records.tenants import Tenants
from gateway.records.usage_report import UsageReport
from gateway.redis.client import connect
from gateway.settings import OFF, Settings, SettingsError
from gateway.sharing.unserved import UnservedRate
from gateway.spans import TRUST_TRACEPARENT, UNTRACED
from wire.model_config import context_length
from wire.telemetry.spans import trace_requests
from wire.telemetry.start import TracingError, start_tracing
from wire.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger(__name__)

METRICS = web.AppKey("metrics", Metrics)
DATABASE = web.AppKey("database", Database)
QUOTA = web.AppKey("quota", Quota)
REGISTRY = web.AppKey("registry", Registry)
LEDGER = web.AppKey("ledger", Ledger)
DRAIN = web.AppKey("drain", Drain)
CONNECTIONS = web.AppKey("connections", Connections)

# Time limit of the shutdown for writing the last usage rows, in addition to the running requests' own.
FLUSH_SECONDS = 20.0


async def make_app(settings: Settings) -> web.Application:
    """Build the gateway. It connects to its database, Redis and engines when the app starts.

    Raises SettingsError for a model folder or a store that cannot be used.
    """
    tokenizer, base, max_model_len = await asyncio.to_thread(_read_model, settings)
    try:
        store = await asyncio.to_thread(open_store, settings.adapter_store)
    except (ValueError, OSError) as error:
        raise SettingsError("LORAPLEX_ADAPTER_STORE", str(error)) from error

    try:
        tracing = start_tracing("loraplex-gateway")
    except TracingError as error:
        raise SettingsError(error.field, error.message) from error

    metrics, lag = Metrics(), LoopLag()
    metrics.watch_loop(lag)
    database = Database(settings.database_url)
    tenants, keys, report = Tenants(database), Keys(database), UsageReport(database)
    changes = Changes(database, settings.key_trust_seconds)
    bootstrap_key = None if settings.admin_key == OFF else settings.admin_key
    # Right secrets that need no throttle: a strong one is compared from every address and on every port.
    strong = StrongSecrets(bootstrap_key, settings.announce_token or settings.internal_token)
    anywhere = settings.admin_port is None or (bootstrap_key is not None and strong.contains(bootstrap_key))
    auth = Authenticator(keys, settings.key_pepper, bootstrap_key, changes, admin_key_anywhere=anywhere)

    def is_proved(presented: str) -> bool:
        return auth.is_issued(presented) or strong.contains(presented)

    catalog = Catalog(database, settings.base_model, changes, TRUST_SECONDS)
    redis = connect(settings.redis_url, settings.redis_timeout)
    journal = Journal(journal_folder(settings.journal_dir.expanduser(), settings.database_url), settings.journal_bytes)
    stream = UsageStream(redis, settings.redis_timeout)
    ledger = Ledger(UsageWriter(database), stream, journal, settings.ledger_queue)
    fallback = parse_fallback(settings.quota_fallback)
    quota = Quota(
        redis,
        settings.redis_timeout,
        settings.lease_seconds,
        fallback,
        metrics.admitted_without_redis,
        UsagePast(database, settings.base_model),
        settings.redis_check,
    )
    prices = Prices(database)
    price_list = PriceList(prices, settings.base_model)
    idempotency = Idempotency(redis, settings.redis_timeout)
    session = new_session(settings.engine_timeout)
    token = settings.internal_token
    announcements = Announcements(redis, settings.redis_timeout) if ANNOUNCED in settings.engines else None
    discovery = Discovery(settings.engine_addresses, announcements)
    registry = Registry(
        discovery, Probe(session, token, settings.base_model, settings.engine_silence), settings.engine_timeout
    )
    gate = Gate(lambda: registry.capacity, settings.queue_length, settings.queue_seconds)
    client = EngineClient(session, token, VllmAdapters(session, store, RecentUses(redis, settings.redis_timeout)))
    deaths = SharedDeaths(redis, settings.database_url)
    secret = settings.key_pepper.encode()
    quarantine = Quarantine(settings.quarantine_seconds, secret, deaths, metrics.quarantined)
    fleet = Fleet(registry, client, gate, settings.engine_timeout, quarantine)
    finished = FinishedClient(session, token)
    accounting = Accounting(quota, ledger, metrics, finished)
    deliveries = Deliveries(
        metrics,
        reader_bytes=settings.reader_buffer_bytes,
        total_bytes=settings.answer_memory_bytes,
        least_rate=settings.least_read_rate,
        window=settings.client_timeout,
    )

    def our_engines() -> list[str]:
        return [engine.url for engine in registry.engines if engine.address.kind == "loraplex"]

    sweep_seconds = settings.lease_seconds / 3
    abandoned = Abandoned(quota, stream, ledger, metrics, finished, our_engines, sweep_seconds)
    metrics.watch(registry, ledger, gate)
    metrics.watch_quota(lambda: not quota.away)

    async def traces(_: web.Application) -> AsyncIterator[None]:
        yield
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    async def connections(_: web.Application) -> AsyncIterator[None]:
        yield
        await session.close()
        await redis.aclose()
        await database.close()

    async def schema(_: web.Application) -> AsyncIterator[None]:
        await database.wait(settings.database_wait)
        if settings.migrate_on_start:
            await database.upgrade()
        await database.check_schema()
        await _check_admin_key(settings, keys)
        yield

    async def access(_: web.Application) -> AsyncIterator[None]:
        async with running(lag.watch()), running(auth.watch()):
            yield
        await changes.close()

    async def leases(_: web.Application) -> AsyncIterator[None]:
        async with running(quota.keep_leases()):
            yield
        await quota.close()

    async def costs(_: web.Application) -> AsyncIterator[None]:
        await price_list.refresh()
        async with running(price_list.watch(changes)):
            yield

    async def engines(_: web.Application) -> AsyncIterator[None]:
        await registry.poll()
        async with running(registry.watch(gate.admit)), running(deliveries.watch()), running(quarantine.watch()):
            yield

    async def usage(_: web.Application) -> AsyncIterator[None]:
        async with running(ledger.run()), running(abandoned.run()):
            yield
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await ledger.close()
        except TimeoutError:
            log.warning("the last usage rows wait in Redis or in the journal for the next gateway")

    async def accounts(_: web.Application) -> AsyncIterator[None]:
        yield
        await accounting.drain(FLUSH_SECONDS)

    # Middlewares, the outermost first.
    logins = FailedLogins(metrics, is_proved, redis, settings.database_url, settings.admin_port)
    wrong_keys = logins.middleware()
    observed = observe(metrics, settings.proxy_networks)
    connected = Connections(settings.max_connections, metrics)
    unserved = UnservedRate(settings.unserved_per_second, is_proved, metrics)
    front = [observed, connected.middleware(), unserved.middleware()]
    middlewares = [*front, error_boundary, wrong_keys, known_parameters, idempotency.for_admin_calls(auth)]
    if settings.admin_port is not None:
        middlewares.insert(4, keep_off_public_port(settings.admin_port))
    if tracing is not None:
        middlewares.insert(
            0, trace_requests(tracing, lambda route: route not in UNTRACED, lambda _: settings.trust_traceparent)
        )
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_body_bytes)
    drain = Drain()
    app[DRAIN], app[CONNECTIONS], app[TRUST_TRACEPARENT] = drain, connected, settings.trust_traceparent
    app.on_response_prepare.extend([add_request_id, hide_server, drain.close_connection, close_unread])
    # The contexts end in reverse order: first the accounts of requests, then the ledger that records them.
    app.cleanup_ctx.extend([traces, connections, schema, access, costs, leases, engines, usage, accounts])
    app[BODY_TIMEOUT] = settings.body_timeout
    app[BODY_MEMORY] = BodyMemory(settings.body_memory_bytes)
    metrics.watch_bodies(lambda: app[BODY_MEMORY].held)
    app[METRICS], app[DATABASE], app[QUOTA], app[REGISTRY], app[LEDGER] = metrics, database, quota, registry, ledger

    prompts = PromptReader(
        tokenizer,
        max_model_len,
        settings.default_max_tokens,
        max_answer_bytes=settings.max_answer_bytes,
        max_event_bytes=settings.reader_buffer_bytes,
        other_engines=any(address.kind == "vllm" for address in settings.engine_addresses),
    )
    admission = Admission(
        auth=auth,
        catalog=catalog,
        prompts=prompts,
        quota=quota,
        prices=price_list,
        fleet=fleet,
        accounting=accounting,
        metrics=metrics,
    )
    models = Models(auth=auth, catalog=catalog, base_model=settings.base_model)
    completions = Completions(
        admission=admission,
        auth=auth,
        fleet=fleet,
        accounting=accounting,
        metrics=metrics,
        deliveries=deliveries,
        max_answer_bytes=settings.max_answer_bytes,
        request_timeout=settings.request_timeout,
    )
    intake = AdapterIntake(
        catalog=catalog,
        store=store,
        base=base,
        rules=upload_rules(settings),
        idempotency=idempotency,
        served=lambda: served(registry.engines, settings.max_lora_rank),
    )
    app.cleanup_ctx.append(intake.run)
    audit = Audit(database)
    chores = {
        "adapters and bytes collected": intake.collect,
        "audit entries removed": lambda: audit.sweep(timedelta(days=settings.tenant_audit_days)),
    }
    app.cleanup_ctx.append(Housekeeping(redis, settings.redis_timeout, chores).running)
    own = Adapters(auth=auth, catalog=catalog, intake=intake, quota=quota)
    admin = Admin(auth=auth, tenants=tenants, catalog=catalog, intake=intake, report=report, registry=registry)
    dashboard = Dashboard(auth=auth, tenants=tenants, catalog=catalog, report=report, registry=registry)
    health = Health(
        database=database,
        quota=quota,
        ledger=ledger,
        registry=registry,
        drain=drain,
        metrics=metrics,
        degraded_is_ready=settings.readiness == "degraded",
        admin_port=settings.admin_port,
    )
    app.cleanup_ctx.append(health.watching)
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat),
            web.post("/v1/completions", completions.completions),
            web.get("/v1/models", models.list),
            web.get("/v1/models/{name:.+}", models.get),
            web.post("/v1/adapters", own.push),
            web.get("/v1/adapters", own.list),
            web.get("/v1/adapters/{name}", own.get),
            web.delete("/v1/adapters/{name}", own.delete),
            web.get("/v1/usage", Usage(auth=auth, report=report).get),
            *admin.routes(),
            *Engines(announcements, token, settings.announce_token).routes(),
            *AdminAudit(auth=auth, audit=audit).routes(),
            *AdminPrices(auth=auth, prices=prices, known=price_list, tenants=tenants, catalog=catalog).routes(),
            *AdminTenants(auth=auth, tenants=tenants, catalog=catalog).routes(),
            *AdminKeys(auth=auth, tenants=tenants, keys=keys, catalog=catalog).routes(),
            web.get("/admin", dashboard.redirect),
            web.get("/admin/", dashboard.page),
            web.get("/admin/static/style.css", dashboard.style),
            web.get("/openapi.json", health.describe),
            web.get("/healthz", health.live),
            web.get("/readyz", health.ready),
        ]
    )
    if settings.metrics_port is None:
        app.router.add_get("/metrics", MetricsPage(metrics, auth).get)
    return app


def _read_model(settings: Settings) -> tuple[Tokenizer, BaseShape, int]:
    """Return the tokenizer, the shapes that adapters must fit, and the context length in tokens. Reads no weights."""
    folder: Path = settings.model_dir
    try:
        tokenizer, base = Tokenizer.from_dir(folder), BaseShape.from_config_dir(folder)
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (TokenizerError, ValueError, OSError) as error:
        raise SettingsError("LORAPLEX_MODEL_DIR", str(error)) from error
    if settings.max_model_len is None and not isinstance(config.get("max_position_embeddings"), int):
        raise SettingsError("LORAPLEX_MAX_MODEL_LEN", "is required: config.json has no max_position_embeddings")
    return tokenizer, base, settings.max_model_len or context_length(config)


async def _check_admin_key(settings: Settings, keys: Keys) -> None:
    """Raise SettingsError if there is no valid key for the admin API."""
    if settings.admin_key != OFF:
        return
    now = datetime.now(UTC)
    if not any(key.valid(now) for key in await keys.list(None)):
        raise SettingsError(
            "LORAPLEX_ADMIN_KEY",
            "is required while the database holds no valid admin key: set it, make one with `loraplex key create "
            "--admin`, then set it to 'off'",
        )
