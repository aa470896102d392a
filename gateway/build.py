"""Construction of a gateway: every object, in order. `gateway/lifecycle.py` starts and ends them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gateway.access.auth import Authenticator
from gateway.access.credentials import StrongSecrets
from gateway.api.adapters import AdapterIntake, Adapters, served, upload_rules
from gateway.api.admin.audit import AdminAudit
from gateway.api.admin.keys import AdminKeys
from gateway.api.admin.prices import AdminPrices
from gateway.api.admin.routes import Admin
from gateway.api.admin.tenants import AdminTenants
from gateway.api.admission import Admission
from gateway.api.completions import Completions
from gateway.api.dashboard import Dashboard
from gateway.api.delivery import Deliveries, make_deliveries
from gateway.api.description import Description, describe_routes
from gateway.api.engines import Engines
from gateway.api.health import Health, MetricsPage
from gateway.api.idempotency import Idempotency
from gateway.api.models import Models
from gateway.api.probes import ProbeRoutes
from gateway.api.requests.memory import BodyMemory
from gateway.api.requests.prompts import PromptReader
from gateway.api.routes import ROUTES
from gateway.api.uploads.importing import Imports
from gateway.api.uploads.resumable import ResumableUploads
from gateway.api.uploads.validating import Validation
from gateway.api.usage import Usage
from gateway.api.versions import AdapterVersions
from gateway.billing.account import Accounting
from gateway.billing.engine_counts import FinishedClient
from gateway.billing.journal import Journal, journal_folder
from gateway.billing.ledger import Ledger
from gateway.billing.past import UsagePast
from gateway.billing.recovery import Abandoned
from gateway.billing.stream import UsageStream
from gateway.billing.writer import UsageWriter
from gateway.fleet.addresses import ANNOUNCED, own_fields
from gateway.fleet.client import EngineClient
from gateway.fleet.discovery import Announcements, Discovery
from gateway.fleet.dispatch import Fleet
from gateway.fleet.engine_service import EngineService
from gateway.fleet.kinds.kind import Services
from gateway.fleet.kinds.recent_uses import RecentUses
from gateway.fleet.kinds.table import make_kinds
from gateway.fleet.pinning import Pinning
from gateway.fleet.prefetch import Prefetch
from gateway.fleet.probe import Probe
from gateway.fleet.probing import AdapterProber
from gateway.fleet.quarantine import Quarantine
from gateway.fleet.queue import Gate
from gateway.fleet.registry import Registry
from gateway.fleet.service_counters import ServiceCounters
from gateway.fleet.shared_deaths import SharedDeaths
from gateway.fleet.shared_service import SharedService
from gateway.process.connections import Connections
from gateway.process.drain import Drain
from gateway.quota.fallback import parse_fallback
from gateway.quota.quota import Quota
from gateway.records.audit import Audit
from gateway.records.catalog import Catalog
from gateway.records.changes import TRUST_SECONDS, Changes
from gateway.records.housekeeping import Chore, Housekeeping
from gateway.records.keys import Keys
from gateway.records.pins import pinned_bases
from gateway.records.prices import PriceList, Prices
from gateway.records.probes import Probes
from gateway.records.tenants import Tenants
from gateway.records.uploads import Uploads
from gateway.records.usage_report import UsageReport
from gateway.resources import Resources, open_resources
from gateway.settings import OFF, Settings


@dataclass(frozen=True, slots=True)
class Records:
    """Records in SQL, and the authenticator of keys."""

    tenants: Tenants
    keys: Keys
    report: UsageReport
    changes: Changes
    catalog: Catalog
    prices: Prices
    price_list: PriceList
    audit: Audit
    auth: Authenticator
    is_proved: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Billing:
    """Limits, settlement and the ledger."""

    quota: Quota
    stream: UsageStream
    ledger: Ledger
    finished: FinishedClient
    accounting: Accounting


@dataclass(frozen=True, slots=True)
class Serving:
    """Engines: discovery, queue and dispatch."""

    announcements: Announcements | None
    registry: Registry
    gate: Gate
    shared_service: SharedService
    engine_service: EngineService
    quarantine: Quarantine
    prober: AdapterProber
    pinning: Pinning
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class Gateway:
    """All objects of a gateway. handlers: the objects whose methods answer the routes, by class."""

    resources: Resources
    records: Records
    billing: Billing
    serving: Serving
    abandoned: Abandoned
    deliveries: Deliveries
    idempotency: Idempotency
    intake: AdapterIntake
    housekeeping: Housekeeping
    body_memory: BodyMemory
    connections: Connections
    drain: Drain
    health: Health
    handlers: dict[type, Any]


async def build(settings: Settings) -> Gateway:
    """Return a gateway. Raises SettingsError, which names every model folder, store or option that cannot be used."""
    resources = await open_resources(settings)
    records = _build_records(resources)
    billing = _build_billing(resources)
    serving = _build_serving(resources)
    metrics = resources.metrics
    metrics.watch(serving.registry, billing.ledger, serving.gate)
    metrics.watch_quota(lambda: not billing.quota.away)
    drain, body_memory = Drain(), BodyMemory(settings.body_memory_bytes)
    metrics.watch_bodies(lambda: body_memory.held)
    idempotency = Idempotency(resources.redis, settings.redis_timeout)
    probes, mode = Probes(resources.database), settings.adapter_probe
    validation = Validation(records.catalog, records.tenants, probes, serving.prober, resources.redis, mode)
    intake = _build_intake(resources, serving, idempotency, validation)
    resumable = _build_resumable(resources, records, billing, intake)
    deliveries = make_deliveries(settings, metrics)
    health = Health(
        database=resources.database,
        quota=billing.quota,
        ledger=billing.ledger,
        registry=serving.registry,
        drain=drain,
        metrics=metrics,
        degraded_is_ready=settings.readiness == "degraded",
        admin_port=settings.admin_port,
    )
    handlers = [
        *_inference_handlers(resources, records, billing, serving, deliveries),
        *_tenant_handlers(resources, records, billing, intake),
        *_admin_handlers(records, serving, intake, resumable),
        resumable,
        _build_imports(resources, records, billing, intake),
        ProbeRoutes(records.tenants, probes, serving.registry, validation, billing.quota),
        Engines(serving.announcements, settings.internal_token, settings.announce_token),
        Description(lambda: describe_routes(ROUTES)),
        health,
    ]
    if settings.metrics_port is None:
        handlers.append(MetricsPage(metrics))
    return Gateway(
        resources,
        records,
        billing,
        serving,
        abandoned=_build_recovery(resources, billing, serving),
        deliveries=deliveries,
        idempotency=idempotency,
        intake=intake,
        housekeeping=_build_housekeeping(resources, records, intake, resumable),
        body_memory=body_memory,
        connections=Connections(settings.max_connections, metrics),
        drain=drain,
        health=health,
        handlers={type(handler): handler for handler in handlers},
    )


def _build_records(resources: Resources) -> Records:
    settings, database = resources.settings, resources.database
    changes = Changes(database, settings.key_trust_seconds)
    keys, prices = Keys(database), Prices(database)
    admin_key = None if settings.admin_key == OFF else settings.admin_key
    # Strong secrets need no throttle: they are compared from every address and on every port.
    strong = StrongSecrets(admin_key, settings.announce_token or settings.internal_token)
    anywhere = settings.admin_port is None or (admin_key is not None and strong.contains(admin_key))
    auth = Authenticator(keys, settings.key_pepper, admin_key, changes, admin_key_anywhere=anywhere)
    return Records(
        Tenants(database),
        keys,
        UsageReport(database),
        changes,
        Catalog(database, settings.base_model, changes, TRUST_SECONDS),
        prices,
        PriceList(prices, settings.base_model),
        Audit(database),
        auth,
        is_proved=lambda presented: auth.is_issued(presented) or strong.contains(presented),
    )


def _build_billing(resources: Resources) -> Billing:
    settings, redis, database = resources.settings, resources.redis, resources.database
    journal = Journal(journal_folder(settings.journal_dir.expanduser(), settings.database_url), settings.journal_bytes)
    stream = UsageStream(redis, settings.redis_timeout)
    ledger = Ledger(UsageWriter(database), stream, journal, settings.ledger_queue)
    quota = Quota(
        redis,
        settings.redis_timeout,
        settings.lease_seconds,
        parse_fallback(settings.quota_fallback),
        resources.metrics.admitted_without_redis,
        UsagePast(database, settings.base_model),
        settings.redis_check,
    )
    finished = FinishedClient(resources.session, settings.internal_token)
    return Billing(quota, stream, ledger, finished, Accounting(quota, ledger, resources.metrics, finished))


def _build_serving(resources: Resources) -> Serving:
    settings, redis, timeout = resources.settings, resources.redis, resources.settings.engine_timeout
    announcements = Announcements(redis, settings.redis_timeout) if ANNOUNCED in settings.engines else None
    services = Services(
        session=resources.session,
        internal_token=settings.internal_token,
        base_model=settings.base_model,
        store=resources.store,
        uses=RecentUses(redis, settings.redis_timeout),
        silence_seconds=settings.engine_silence,
    )
    kinds = make_kinds(services)
    probe = Probe(resources.session, kinds, settings.base_model)
    registry = Registry(Discovery(settings.engine_addresses, announcements), probe, timeout)
    counters = ServiceCounters()
    gate = Gate(lambda: registry.capacity, counters, settings.queue_length, settings.queue_seconds)
    quarantine = Quarantine(
        settings.quarantine_seconds,
        settings.key_pepper.encode(),
        SharedDeaths(redis, settings.database_url),
        resources.metrics.quarantined,
    )
    client = EngineClient(kinds)
    engine_service = EngineService(lambda: registry.up, client.send_service)
    fleet = Fleet(registry, client, gate, timeout, quarantine, engine_service, Prefetch(client.send_hint))
    pinning = Pinning(lambda: registry.up, lambda: pinned_bases(resources.database), client.send_pins, fleet.rates)
    shared_service = SharedService(redis, settings.database_url, counters)
    prober = AdapterProber(registry, kinds, quarantine)
    return Serving(announcements, registry, gate, shared_service, engine_service, quarantine, prober, pinning, fleet)


def _build_intake(
    resources: Resources, serving: Serving, idempotency: Idempotency, validation: Validation
) -> AdapterIntake:
    return AdapterIntake(
        catalog=validation.catalog,
        store=resources.store,
        base=resources.model.base,
        rules=upload_rules(resources.settings),
        idempotency=idempotency,
        served=lambda: served(serving.registry.engines, resources.settings.max_lora_rank),
        validation=validation,
    )


def _build_recovery(resources: Resources, billing: Billing, serving: Serving) -> Abandoned:
    def with_usage_log() -> list[str]:
        return [engine.url for engine in serving.registry.engines if engine.address.traits.has_usage_log]

    seconds = resources.settings.lease_seconds / 3
    return Abandoned(
        billing.quota, billing.stream, billing.ledger, resources.metrics, billing.finished, with_usage_log, seconds
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


def _build_housekeeping(
    resources: Resources, records: Records, intake: AdapterIntake, resumable: ResumableUploads
) -> Housekeeping:
    kept = timedelta(days=resources.settings.tenant_audit_days)
    chores: dict[str, Chore] = {
        "adapters and bytes collected": intake.collect,
        "unfinished uploads removed": resumable.sweep,
        "audit entries removed": lambda: records.audit.sweep(kept),
    }
    return Housekeeping(resources.redis, resources.settings.redis_timeout, chores)


def _inference_handlers(
    resources: Resources, records: Records, billing: Billing, serving: Serving, deliveries: Deliveries
) -> list[Any]:
    settings = resources.settings
    prompts = PromptReader(
        resources.model.tokenizer,
        resources.model.max_length,
        settings.default_max_tokens,
        max_answer_bytes=settings.max_answer_bytes,
        max_event_bytes=settings.reader_buffer_bytes,
        own_fields=own_fields(settings.engine_addresses),
    )
    admission = Admission(
        catalog=records.catalog,
        prompts=prompts,
        quota=billing.quota,
        prices=records.price_list,
        fleet=serving.fleet,
        accounting=billing.accounting,
        metrics=resources.metrics,
    )
    completions = Completions(
        admission=admission,
        auth=records.auth,
        fleet=serving.fleet,
        accounting=billing.accounting,
        metrics=resources.metrics,
        deliveries=deliveries,
        max_answer_bytes=settings.max_answer_bytes,
        request_timeout=settings.request_timeout,
    )
    return [completions, Models(catalog=records.catalog, base_model=settings.base_model)]


def _tenant_handlers(resources: Resources, records: Records, billing: Billing, intake: AdapterIntake) -> list[Any]:
    return [
        Adapters(auth=records.auth, catalog=records.catalog, intake=intake, quota=billing.quota),
        AdapterVersions(
            tenants=records.tenants,
            catalog=records.catalog,
            uploads=Uploads(resources.database),
            quota=billing.quota,
        ),
        Usage(report=records.report),
    ]


def _admin_handlers(
    records: Records, serving: Serving, intake: AdapterIntake, resumable: ResumableUploads
) -> list[Any]:
    auth, tenants, catalog, report = records.auth, records.tenants, records.catalog, records.report
    return [
        Admin(
            tenants=tenants,
            intake=intake,
            uploads=resumable,
            report=report,
            registry=serving.registry,
            gate=serving.gate,
        ),
        AdminAudit(audit=records.audit),
        AdminPrices(auth=auth, prices=records.prices, known=records.price_list, tenants=tenants, catalog=catalog),
        AdminTenants(auth=auth, tenants=tenants, catalog=catalog),
        AdminKeys(auth=auth, tenants=tenants, keys=records.keys, catalog=catalog),
        Dashboard(auth=auth, tenants=tenants, catalog=catalog, report=report, registry=serving.registry),
    ]
