"""Construction of the pages: their frame, and the objects whose methods answer their routes."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from gateway.access.login_audit import LoginAudit
from gateway.access.oidc import Oidc
from gateway.access.sessions import COOKIE, VISITOR
from gateway.api.admin.engines import AdminEngines
from gateway.api.admin.fleet_views import FleetViews, Residents
from gateway.api.health import Health
from gateway.pages.adapter_pages import build_adapter_pages
from gateway.pages.assets import Assets
from gateway.pages.attention import Needs
from gateway.pages.console.build import build_console
from gateway.pages.engines import EnginePages
from gateway.pages.fairness import FairnessPages
from gateway.pages.filters import money
from gateway.pages.frame import Frame
from gateway.pages.live import Live
from gateway.pages.login import LoginPages
from gateway.pages.oidc_login import OidcPages
from gateway.pages.overview import Overview
from gateway.pages.record_pages import build_record_pages
from gateway.pages.report_pages import build_report_pages
from gateway.pages.strip import Strip
from gateway.parts import Billing, Records, Serving
from gateway.process.drain import Drain
from gateway.records.activity import Activity
from gateway.records.attention import Attention
from gateway.records.residency import Residency
from gateway.resources import Resources


@dataclass(frozen=True, slots=True)
class Pages:
    """The frame, and the objects whose methods answer the routes of pages."""

    frame: Frame
    handlers: list[Any]


def build_pages(
    resources: Resources,
    records: Records,
    billing: Billing,
    serving: Serving,
    health: Health,
    drain: Drain,
) -> Pages:
    """Return the pages. Each group of pages gets the frame."""
    settings, database = resources.settings, resources.database
    assets = Assets()
    strip = Strip(lambda: health.states, serving.registry, serving.gate)
    frame = Frame(strip, assets, lambda request: request.get(VISITOR), settings.currency)

    async def still_valid(request: web.Request) -> bool:
        return await records.sessions.find(request.cookies.get(COOKIE, ""), is_read=True, is_use=False) is not None

    live = Live(frame, lambda request: request[VISITOR], still_valid, lambda: drain.begun)
    needs = Needs(
        Attention(database, records.tenants, records.report),
        billing.ledger,
        lambda micro_units: money(micro_units, settings.currency),
    )
    activity = Activity(database, timedelta(hours=settings.minute_sums_hours))
    overview = Overview(frame=frame, strip=strip, activity=activity, needs=needs)
    acts = AdminEngines(registry=serving.registry, drains=serving.drains, audit=records.audit)
    residents = Residents(registry=serving.registry, rates=serving.fleet.rates, residency=Residency(database))
    engines = EnginePages(
        frame=frame,
        registry=serving.registry,
        history=serving.history,
        residents=residents,
        acts=acts,
    )
    record_pages = build_record_pages(frame, records, billing.quota, settings.currency)
    adapter_pages = build_adapter_pages(frame, resources, records, serving)
    return Pages(
        frame,
        [
            assets,
            *_build_log_ins(resources, records, frame),
            live,
            overview,
            acts,
            engines,
            FleetViews(registry=serving.registry, history=serving.history, residents=residents),
            FairnessPages(frame=frame, fairness=serving.fairness, gate=serving.gate),
            *record_pages,
            *adapter_pages,
            *build_report_pages(frame, resources, records),
            *build_console(resources, frame, records, billing, activity),
        ],
    )


def _build_log_ins(resources: Resources, records: Records, frame: Frame) -> list[Any]:
    settings, provider = resources.settings, resources.settings.oidc_provider
    login = LoginPages(
        frame=frame,
        auth=records.auth,
        sessions=records.sessions,
        throttle=records.wrong_keys,
        audit=LoginAudit(records.audit),
        lifetime=timedelta(seconds=settings.session_seconds),
        provider=None if provider is None else urlsplit(provider.issuer).hostname,
    )
    oidc = OidcPages(
        oidc=None if provider is None else Oidc(provider, resources.session),
        auth=records.auth,
        tenants=records.tenants,
        pages=login,
        redis=resources.redis,
    )
    return [login, oidc]
