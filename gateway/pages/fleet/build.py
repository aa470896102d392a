"""Construction of the pages of engines and of the tenants' shares."""

from typing import Any

from gateway.api.admin.bases import AdminBases
from gateway.api.admin.engines import AdminEngines
from gateway.api.admin.fleet_views import FleetViews, Residents
from gateway.api.admin.quarantine import AdminQuarantine
from gateway.components import Records, Serving
from gateway.pages.fleet.bases import BasePages
from gateway.pages.fleet.engines import EnginePages
from gateway.pages.fleet.fairness import FairnessPages
from gateway.pages.fleet.first_tokens import FirstTokens
from gateway.pages.frame.frame import Frame
from gateway.records.activity.report import Activity
from gateway.records.adapters.probes import Probes
from gateway.records.adapters.residency import Residency
from gateway.resources import Resources


def build_fleet_pages(
    frame: Frame, resources: Resources, records: Records, serving: Serving, activity: Activity
) -> list[Any]:
    """Return the objects of these pages, and those of the JSON routes of engines."""
    registry, history = serving.registry, serving.history
    acts = AdminEngines(registry=registry, drains=serving.drains, audit=records.audit)
    residents = Residents(registry=registry, rates=serving.dispatcher.rates, residency=Residency(resources.database))
    probes = Probes(resources.database)
    bases = AdminBases(records.bases, registry, probes, records.prices, records.price_list, records.auth)
    return [
        acts,
        AdminQuarantine(quarantine=serving.quarantine, tenants=records.tenants, audit=records.audit),
        bases,
        BasePages(frame=frame, records=records, registry=registry, probes=probes, acts=bases),
        EnginePages(
            frame=frame, registry=registry, history=history, residents=residents, acts=acts, bases=records.bases
        ),
        FleetViews(registry=registry, history=history, residents=residents),
        FairnessPages(frame=frame, fairness=serving.fairness, first_tokens=FirstTokens(activity)),
    ]
