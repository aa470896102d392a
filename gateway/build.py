"""Construction of a gateway: its parts, and the objects whose methods answer the routes.

`gateway/parts.py` makes the parts below the routes; `gateway/lifecycle.py` starts and ends them.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
from gateway.api.golden.build import build_golden
from gateway.api.golden.upgrades import Upgrades
from gateway.api.health import Health, MetricsPage
from gateway.api.idempotency import Idempotency
from gateway.api.models import Models
from gateway.api.probes import ProbeRoutes
from gateway.api.requests.memory import BodyMemory
from gateway.api.requests.prompts import PromptReader
from gateway.api.routes import ROUTES
from gateway.api.saved_mixtures import SavedMixtureRoutes
from gateway.api.uploads.importing import Imports
from gateway.api.uploads.resumable import ResumableUploads
from gateway.api.uploads.validating import Validation
from gateway.api.usage import Usage
from gateway.api.versions import AdapterVersions
from gateway.billing.recovery import Abandoned
from gateway.fleet.addresses import own_fields
from gateway.parts import Billing, Records, Serving, build_billing, build_records, build_serving
from gateway.process.connections import Connections
from gateway.process.drain import Drain
from gateway.records.housekeeping import Chore, Housekeeping
from gateway.records.probes import Probes
from gateway.records.uploads import Uploads
from gateway.resources import Resources, open_resources
from gateway.settings import Settings


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
    upgrades: Upgrades
    body_memory: BodyMemory
    connections: Connections
    drain: Drain
    health: Health
    handlers: dict[type, Any]


async def build(settings: Settings) -> Gateway:
    """Return a gateway. Raises SettingsError, which names every model folder, store or option that cannot be used."""
    resources = await open_resources(settings)
    records = build_records(resources)
    billing = build_billing(resources)
    serving = build_serving(resources)
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
    admission = _build_admission(resources, records, billing, serving)
    golden, upgrades = build_golden(resources, records, billing, serving, admission, body_memory)
    handlers = [
        *_inference_handlers(resources, records, billing, serving, admission, deliveries),
        golden,
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
        upgrades=upgrades,
        body_memory=body_memory,
        connections=Connections(settings.max_connections, metrics),
        drain=drain,
        health=health,
        handlers={type(handler): handler for handler in handlers},
    )


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


def _build_admission(resources: Resources, records: Records, billing: Billing, serving: Serving) -> Admission:
    settings = resources.settings
    prompts = PromptReader(
        resources.model.tokenizer,
        resources.model.max_length,
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
        fleet=serving.fleet,
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
) -> list[Any]:
    settings = resources.settings
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
        SavedMixtureRoutes(tenants=records.tenants, catalog=records.catalog, quota=billing.quota),
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
