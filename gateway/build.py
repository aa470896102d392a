"""Construction of a gateway: its components, and the objects whose methods answer the routes.

`gateway/components.py` makes the components below the routes; `gateway/lifecycle.py` starts and ends them.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from gateway.alerts.build import Alerts, build_alerts
from gateway.api.adapters.handlers import AdapterIntake, Adapters, engine_limits, upload_rules
from gateway.api.adapters.probes import ProbeRoutes
from gateway.api.adapters.saved_mixtures import SavedMixtureRoutes
from gateway.api.adapters.use import AdapterUseRoutes
from gateway.api.adapters.versions import AdapterVersions
from gateway.api.admin.adapters import AdminAdapters
from gateway.api.admin.alerts import AdminWebhooks
from gateway.api.admin.audit import AdminAudit
from gateway.api.admin.keys import KeyRoutes
from gateway.api.admin.plans import AdminPlans
from gateway.api.admin.prices import AdminPrices
from gateway.api.admin.routes import Admin
from gateway.api.admin.sessions import AdminSessions
from gateway.api.admin.tenant_bulk import AdminTenantBulk
from gateway.api.admin.tenant_chats import TenantChats
from gateway.api.admin.tenants import AdminTenants
from gateway.api.description import Description, describe_routes
from gateway.api.engines import Engines
from gateway.api.golden.build import build_golden
from gateway.api.golden.handlers import GoldenRoutes
from gateway.api.golden.upgrades import Upgrades
from gateway.api.health import HealthRoutes, MetricsPage
from gateway.api.home import Home
from gateway.api.idempotency import Idempotency
from gateway.api.inference.admission import Admission
from gateway.api.inference.completions import Completions
from gateway.api.inference.delivery import Deliveries, make_deliveries
from gateway.api.inference.time_limit import TimeLimit
from gateway.api.key_manager import KeyManager
from gateway.api.models import Models
from gateway.api.reports.audit import OwnAudit
from gateway.api.reports.build import build_reports
from gateway.api.requests.memory import BodyMemory
from gateway.api.requests.prompts import PromptReader
from gateway.api.uploads.checking import EngineLimits
from gateway.api.uploads.importing import Imports
from gateway.api.uploads.resumable import ResumableUploads
from gateway.api.uploads.validating import Validation
from gateway.api.webhook_manager import WebhookManager
from gateway.billing.activity_rebuild import ActivityRebuild
from gateway.billing.own_engines import OwnEngines
from gateway.billing.recovery import LeaseRecovery
from gateway.components import Billing, Records, Serving, build_billing, build_records, build_serving
from gateway.fleet.discovery.addresses import own_fields
from gateway.metric_sources import watch_parts
from gateway.pages.adapters.build import AdapterParts, build_adapter_page
from gateway.pages.build import build_pages
from gateway.pages.frame.form_answers import FormAnswers
from gateway.pages.frame.frame import Frame
from gateway.pages.settings.build import build_setting_pages
from gateway.process.connections import ConnectionLimiter
from gateway.process.disks import Disks
from gateway.process.drain import Drain
from gateway.process.store_probe import StoreProbe
from gateway.records.adapters.probes import Probes
from gateway.records.adapters.uploads import Uploads
from gateway.records.caches.cached_query import CachedQuery
from gateway.records.maintenance.housekeeping import Chore, Housekeeping
from gateway.records.maintenance.retention import Retention
from gateway.records.money.priced_names import AdapterPrices
from gateway.records.partitions.partitions import Partitions
from gateway.resources import Resources, open_resources
from gateway.route_table import ROUTES
from gateway.settings import Settings
from gateway.workers import is_first_worker


@dataclass(frozen=True, slots=True)
class Gateway:
    """All objects of a gateway. handlers: the objects whose methods answer the routes, by class."""

    resources: Resources
    records: Records
    billing: Billing
    serving: Serving
    recovery: LeaseRecovery
    deliveries: Deliveries
    idempotency: Idempotency
    intake: AdapterIntake
    housekeeping: Housekeeping
    upgrades: Upgrades
    body_memory: BodyMemory
    connections: ConnectionLimiter
    drain: Drain
    health: HealthRoutes
    alerts: Alerts
    disks: Disks
    frame: Frame
    answers: FormAnswers
    handlers: dict[type, Any]


async def build(settings: Settings) -> Gateway:
    """Return a gateway. Raises SettingsError, which names every model folder, store or option that cannot be used."""
    resources = await open_resources(settings)
    records = build_records(resources)
    serving = build_serving(resources, records.bases, records.changes)
    billing = build_billing(resources, records.bases, serving.fairness)
    metrics, drain, body_memory = resources.metrics, Drain(), BodyMemory(settings.body_memory_bytes)
    watch_parts(metrics, billing, serving, body_memory)
    idempotency = Idempotency(resources.redis, settings.redis_timeout)
    probes, mode = Probes(resources.database), settings.adapter_probe
    missing = CachedQuery(records.changes, probes.missing)
    validation = Validation(records.catalog, records.tenants, probes, missing, serving.prober, resources.redis, mode)
    intake = _build_intake(resources, serving, idempotency, validation)
    resumable = _build_resumable(resources, records, billing, intake)
    deliveries = make_deliveries(settings, metrics)
    health = _build_health(resources, billing, serving, drain)
    pages = build_pages(resources, records, billing, serving, health, drain)
    admission = _build_admission(resources, records, billing, serving)
    alerts = build_alerts(resources, records, serving)
    manager = _build_webhook_manager(settings, records, alerts)
    golden, upgrades = build_golden(resources, records, billing, serving, admission, body_memory)
    handlers = [
        resumable,
        *_inference_handlers(resources, records, billing, serving, admission, deliveries, drain),
        golden,
        *_tenant_handlers(resources, records, billing, intake),
        *_admin_handlers(records, billing, serving, intake, resumable),
        _build_imports(resources, records, billing, intake),
        AdminWebhooks(manager=manager, events=alerts.events),
        ProbeRoutes(records.tenants, probes, validation, billing.quota),
        *_adapter_handlers(pages.frame, resources, records, billing, serving, intake, golden),
        Engines(serving.announcements, settings.internal_token, settings.announce_token),
        Description(describe_routes(ROUTES)),
        *pages.handlers,
        *build_setting_pages(pages.frame, resources, records, billing, alerts, manager),
        *([MetricsPage(metrics)] if settings.metrics_port is None else []),
        Home(lambda: {route.path for route in ROUTES}, settings.admin_port),
        health,
    ]
    return Gateway(
        resources,
        records,
        billing,
        serving,
        recovery=_build_recovery(resources, billing, serving),
        deliveries=deliveries,
        idempotency=idempotency,
        intake=intake,
        housekeeping=_build_housekeeping(resources, records, intake, resumable, alerts),
        upgrades=upgrades,
        body_memory=body_memory,
        connections=ConnectionLimiter(settings.max_connections, metrics),
        drain=drain,
        health=health,
        alerts=alerts,
        disks=Disks(settings.disk_folders, metrics.disk),
        frame=pages.frame,
        answers=pages.answers,
        handlers={type(handler): handler for handler in handlers},
    )


def _build_intake(
    resources: Resources, serving: Serving, idempotency: Idempotency, validation: Validation
) -> AdapterIntake:
    return AdapterIntake(
        catalog=validation.catalog,
        store=resources.store,
        rules=upload_rules(resources.settings),
        idempotency=idempotency,
        engine_limits=partial(_engine_limits, resources, serving),
        validation=validation,
    )


def _engine_limits(resources: Resources, serving: Serving, base: str) -> EngineLimits:
    return engine_limits(serving.registry.engines, resources.settings.max_lora_rank, base)


def _build_recovery(resources: Resources, billing: Billing, serving: Serving) -> LeaseRecovery:
    def listed() -> dict[str, bool]:
        return {engine.url: engine.address.traits.has_usage_log for engine in serving.registry.engines}

    seconds, engines = resources.settings.lease_seconds / 3, OwnEngines(listed)
    return LeaseRecovery(
        billing.quota, billing.stream, billing.ledger, resources.metrics, billing.usage_logs, engines, seconds
    )


def _build_resumable(
    resources: Resources, records: Records, billing: Billing, intake: AdapterIntake
) -> ResumableUploads:
    return ResumableUploads(
        auth=records.auth,
        tenants=records.tenants,
        catalog=records.catalog,
        uploads=Uploads(resources.database),
        store=resources.store,
        intake=intake,
        quota=billing.quota,
        rules=upload_rules(resources.settings),
    )


def _build_imports(resources: Resources, records: Records, billing: Billing, intake: AdapterIntake) -> Imports:
    return Imports(
        auth=records.auth,
        tenants=records.tenants,
        catalog=records.catalog,
        intake=intake,
        quota=billing.quota,
        rules=upload_rules(resources.settings),
        sources=resources.import_sources,
        hub=resources.settings.import_hub,
    )


def _adapter_handlers(
    frame: Frame,
    resources: Resources,
    records: Records,
    billing: Billing,
    serving: Serving,
    intake: AdapterIntake,
    golden: GoldenRoutes,
) -> list[Any]:
    """Return the routes of an adapter's versions and use, and its page, which calls them."""
    versions = AdapterVersions(
        tenants=records.tenants,
        catalog=records.catalog,
        uploads=Uploads(resources.database),
        quota=billing.quota,
    )
    uses = AdapterUseRoutes(
        tenants=records.tenants,
        catalog=records.catalog,
        uses=records.adapter_uses,
        probes=Probes(resources.database),
        operator_prefetch=serving.operator_prefetch,
        currency=records.price_list.currency,
    )
    parts = AdapterParts(intake, golden.checks, uses, versions)
    return [versions, uses, *build_adapter_page(frame, resources, records, billing, serving, parts)]


def _build_housekeeping(
    resources: Resources, records: Records, intake: AdapterIntake, resumable: ResumableUploads, alerts: Alerts
) -> Housekeeping:
    settings = resources.settings
    retention = Retention(resources.database)
    kept, refused_kept = timedelta(days=settings.tenant_audit_days), timedelta(days=settings.refused_days)
    minutes_kept = timedelta(hours=settings.minute_sums_hours)
    usage_kept, sums_kept = (
        None if days is None else timedelta(days=days) for days in (settings.usage_days, settings.sums_days)
    )
    rebuild = ActivityRebuild(resources.database, minutes_kept)
    chores: dict[str, Chore] = {
        "partitions of usage made": Partitions(resources.database).make,
        # The rebuild reads rows, so it runs before retention removes them.
        "days of sums rebuilt": rebuild.run,
        "adapters and bytes collected": intake.collect_if_known,
        "unfinished uploads removed": resumable.sweep,
        "events removed": alerts.events.sweep,
        "audit entries removed": lambda: records.audit.sweep(kept),
        "sums by minute removed": lambda: retention.prune_minutes(minutes_kept),
        "usage rows removed": lambda: retention.prune_usage(usage_kept),
        # After the rows, so that no row outlives its sums.
        "sums by hour and day removed": lambda: retention.prune_sums(sums_kept),
        "refused requests removed": lambda: records.refusals.prune(refused_kept, datetime.now(UTC)),
        "sessions removed": records.sessions.sweep,
    }
    return Housekeeping(resources.redis, settings.redis_timeout, chores, logs_clock=is_first_worker())


def _build_webhook_manager(settings: Settings, records: Records, alerts: Alerts) -> WebhookManager:
    return WebhookManager(
        webhooks=alerts.webhooks,
        tenants=records.tenants,
        sender=alerts.sender,
        pepper=settings.key_pepper,
        http_hosts=settings.webhook_http_hosts,
        has_mail=settings.smtp_url is not None,
    )


def _build_health(resources: Resources, billing: Billing, serving: Serving, drain: Drain) -> HealthRoutes:
    return HealthRoutes(
        database=resources.database,
        quota=billing.quota,
        ledger=billing.ledger,
        registry=serving.registry,
        drain=drain,
        metrics=resources.metrics,
        store=StoreProbe(resources.store),
        settings=resources.settings,
    )


def _build_admission(resources: Resources, records: Records, billing: Billing, serving: Serving) -> Admission:
    settings = resources.settings
    prompts = PromptReader(
        serving.tokenizers,
        settings.default_max_tokens,
        max_answer_bytes=settings.max_answer_bytes,
        max_event_bytes=settings.reader_buffer_bytes,
        own_fields=own_fields(settings.engine_addresses),
    )
    return Admission(
        catalog=records.catalog,
        prompts=prompts,
        quota=billing.quota,
        prices=records.price_list,
        dispatcher=serving.dispatcher,
        accounting=billing.accounting,
        metrics=resources.metrics,
    )


def _inference_handlers(
    resources: Resources,
    records: Records,
    billing: Billing,
    serving: Serving,
    admission: Admission,
    deliveries: Deliveries,
    drain: Drain,
) -> list[Any]:
    settings = resources.settings
    completions = Completions(
        admission=admission,
        dispatcher=serving.dispatcher,
        accounting=billing.accounting,
        metrics=resources.metrics,
        deliveries=deliveries,
        max_answer_bytes=settings.max_answer_bytes,
        time_limit=TimeLimit(records.auth, settings.request_timeout, drain),
    )
    models = Models(
        catalog=records.catalog,
        prices=AdapterPrices(resources.database, records.price_list),
    )
    chats = TenantChats(
        tenants=records.tenants,
        adapters=records.adapter_list,
        bases=records.bases,
        completions=completions,
        audit=records.audit,
    )
    return [completions, models, chats]


def _tenant_handlers(resources: Resources, records: Records, billing: Billing, intake: AdapterIntake) -> list[Any]:
    return [
        Adapters(auth=records.auth, catalog=records.catalog, intake=intake, quota=billing.quota),
        SavedMixtureRoutes(tenants=records.tenants, catalog=records.catalog, quota=billing.quota),
        *build_reports(resources, records, billing),
    ]


def _admin_handlers(
    records: Records, billing: Billing, serving: Serving, intake: AdapterIntake, resumable: ResumableUploads
) -> list[Any]:
    auth, tenants, catalog, report = records.auth, records.tenants, records.catalog, records.report
    return [
        Admin(
            tenants=tenants,
            intake=intake,
            uploads=resumable,
            report=report,
            registry=serving.registry,
            queues=serving.queues,
            audit=records.audit,
            currency=records.price_list.currency,
        ),
        AdminAdapters(adapters=records.adapter_list, registry=serving.registry),
        AdminAudit(audit=records.audit),
        OwnAudit(audit=records.audit),
        AdminPlans(auth=auth, plans=records.plans, known=records.price_list, bases=records.bases),
        AdminPrices(auth=auth, prices=records.prices, known=records.price_list, tenants=tenants, catalog=catalog),
        AdminTenants(auth=auth, tenants=tenants, lists=records.tenant_lists, plans=records.plans, catalog=catalog),
        AdminTenantBulk(auth=auth, bulk=records.tenant_bulk),
        KeyRoutes(
            manager=KeyManager(auth=auth, keys=records.keys, catalog=catalog),
            tenants=tenants,
            quota=billing.quota,
            lists=records.key_lists,
        ),
        AdminSessions(sessions=records.sessions, records=records.session_records, tenants=tenants),
    ]
