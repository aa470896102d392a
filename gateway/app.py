"""Application of the gateway: its middlewares and routes around the objects of `gateway/build.py`."""

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.api.access_log import add_request_id, hide_server, observe
from gateway.api.cors import allow_origins, answer_preflights
from gateway.api.inference.delivery import DELIVERIES
from gateway.api.page_guard import PageGuard
from gateway.api.requests.fields import BODY_TIMEOUT
from gateway.api.requests.memory import BODY_MEMORY
from gateway.api.requests.query import known_parameters
from gateway.api.requests.refused_bodies import UnreadBodies
from gateway.api.scopes import AUTH, Guards
from gateway.api.unserved_rate import UnservedRate
from gateway.billing.ledger import Ledger
from gateway.build import Gateway, build
from gateway.error_boundary import error_boundary
from gateway.fleet.discovery.registry import Registry
from gateway.lifecycle import Lifecycle
from gateway.metrics import Metrics
from gateway.pages.frame.errors import error_pages
from gateway.process.admin_port import keep_off_public_port
from gateway.process.connections import ConnectionLimiter
from gateway.process.drain import Drain
from gateway.process.loop_lag import LoopLag
from gateway.quota.quota import Quota
from gateway.records.sql.database import Database
from gateway.route_table import KEYED, PARAMETERS, add_routes
from gateway.settings import Settings
from gateway.spans import TRUST_TRACEPARENT, UNTRACED
from wire.telemetry.spans import trace_requests

METRICS = web.AppKey("metrics", Metrics)
DATABASE = web.AppKey("database", Database)
QUOTA = web.AppKey("quota", Quota)
REGISTRY = web.AppKey("registry", Registry)
LEDGER = web.AppKey("ledger", Ledger)
DRAIN = web.AppKey("drain", Drain)
CONNECTIONS = web.AppKey("connections", ConnectionLimiter)
LAG = web.AppKey("lag", LoopLag)


async def make_app(settings: Settings) -> web.Application:
    """Build the gateway. It connects to its database, Redis and engines when the app starts. Raises SettingsError."""
    gateway = await build(settings)
    resources, billing = gateway.resources, gateway.billing
    app = web.Application(middlewares=_middlewares(gateway), client_max_size=settings.max_body_bytes)
    app.on_response_prepare.extend([add_request_id, hide_server, gateway.drain.close_connection, UnreadBodies().close])
    if settings.cors_origins:
        app.on_response_prepare.append(allow_origins(settings.cors_origins))
    app.cleanup_ctx.extend(Lifecycle(gateway).contexts())
    app[BODY_TIMEOUT], app[BODY_MEMORY] = settings.body_timeout, gateway.body_memory
    app[METRICS], app[DATABASE], app[REGISTRY] = resources.metrics, resources.database, gateway.serving.registry
    app[DELIVERIES], app[AUTH] = gateway.deliveries, gateway.records.auth
    app[QUOTA], app[LEDGER] = billing.quota, billing.ledger
    app[DRAIN], app[CONNECTIONS], app[LAG] = gateway.drain, gateway.connections, resources.lag
    app[TRUST_TRACEPARENT] = settings.trust_traceparent
    add_routes(app, gateway.handlers, Guards(gateway.records.auth, PageGuard(gateway.records.sessions)))
    return app


def _middlewares(gateway: Gateway) -> list[Middleware]:
    """Return the middlewares, the outermost first."""
    resources, records = gateway.resources, gateway.records
    settings, metrics = resources.settings, resources.metrics
    wrong_keys = records.wrong_keys.middleware()
    unserved = UnservedRate(settings.unserved_per_second, records.is_proved, metrics, KEYED).middleware()
    order = [
        observe(metrics, settings.proxy_networks, records.refusals, records.request_ids.new),
        gateway.connections.middleware(),
        unserved,
        error_boundary,
        gateway.answers.middleware(),
        error_pages(gateway.frame),
        wrong_keys,
        known_parameters(PARAMETERS),
        gateway.idempotency.for_admin_calls(records.auth),
    ]
    if settings.cors_origins:
        order.insert(order.index(wrong_keys), answer_preflights(settings.cors_origins))
    if settings.admin_port is not None:
        order.insert(order.index(wrong_keys), keep_off_public_port(settings.admin_port))
    if resources.tracing is not None:
        is_trusted = settings.trust_traceparent
        order.insert(0, trace_requests(resources.tracing, lambda route: route not in UNTRACED, lambda _: is_trusted))
    return order
