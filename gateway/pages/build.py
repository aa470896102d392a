"""Construction of the pages: their frame, and the objects whose methods answer their routes."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from aiohttp import web

from gateway.access.sessions import COOKIE, VISITOR
from gateway.api.health import HealthRoutes
from gateway.components import Billing, Records, Serving
from gateway.pages.adapters.build import build_adapter_pages
from gateway.pages.console.build import build_console
from gateway.pages.fleet.build import build_fleet_pages
from gateway.pages.frame.assets import Assets
from gateway.pages.frame.form_answers import FormAnswers
from gateway.pages.frame.frame import Frame
from gateway.pages.frame.live import Live
from gateway.pages.frame.strip import Strip
from gateway.pages.login.build import build_login
from gateway.pages.money.build import build_money_pages
from gateway.pages.overview.build import build_overview
from gateway.pages.requests.build import build_request_pages
from gateway.pages.tenants.build import build_tenant_pages
from gateway.process.drain import Drain
from gateway.records.activity.report import Activity
from gateway.resources import Resources


@dataclass(frozen=True, slots=True)
class Pages:
    """The frame, the kept answers to forms, and the objects whose methods answer the routes of pages."""

    frame: Frame
    answers: FormAnswers
    handlers: list[Any]


def build_pages(
    resources: Resources,
    records: Records,
    billing: Billing,
    serving: Serving,
    health: HealthRoutes,
    drain: Drain,
) -> Pages:
    """Return the pages without those of settings and of one adapter, which need objects of the API."""
    settings = resources.settings
    assets = Assets()
    strip = Strip(lambda: health.states, serving.registry, serving.queues)
    frame = Frame(strip, assets, lambda request: request.get(VISITOR), settings.currency, settings.environment)

    async def still_valid(request: web.Request) -> bool:
        return await records.sessions.find(request.cookies.get(COOKIE, ""), is_read=True, is_use=False) is not None

    activity = Activity(resources.database, timedelta(hours=settings.minute_sums_hours))
    answers = FormAnswers(resources.redis, settings.redis_timeout, records.auth.keyed_hash)
    return Pages(
        frame,
        answers,
        [
            assets,
            answers,
            Live(frame, lambda request: request[VISITOR], still_valid, lambda: drain.begun),
            *build_login(frame, resources, records),
            *build_overview(frame, strip, resources, records, billing, activity, serving.history),
            *build_fleet_pages(frame, resources, records, serving, activity),
            *build_tenant_pages(frame, records, billing.quota, activity, serving.fairness, settings),
            *build_money_pages(frame, resources, records),
            *build_request_pages(frame, resources, records),
            *build_adapter_pages(frame, resources, records, serving),
            *build_console(resources, frame, records, billing, activity),
        ],
    )
