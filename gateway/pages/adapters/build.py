"""Construction of the pages of adapters and of the playground."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gateway.api.adapters.handlers import AdapterIntake
from gateway.api.adapters.use import AdapterUseRoutes
from gateway.api.adapters.versions import AdapterVersions
from gateway.api.golden.checking import GoldenChecks
from gateway.components import Billing, Records, Serving
from gateway.pages.adapters.actions import AdapterActs
from gateway.pages.adapters.list import AdapterListPage
from gateway.pages.adapters.page import AdapterPages, Reports
from gateway.pages.adapters.playground import PlaygroundPages
from gateway.pages.adapters.upload import AdapterUploads
from gateway.pages.frame.frame import Frame
from gateway.records.activity.report import Activity
from gateway.records.adapters.golden import Golden
from gateway.records.adapters.probes import Probes
from gateway.records.adapters.uploads import Uploads
from gateway.resources import Resources


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """Objects of the API that the pages call."""

    intake: AdapterIntake
    checks: GoldenChecks
    uses: AdapterUseRoutes
    versions: AdapterVersions


def build_adapter_pages(frame: Frame, resources: Resources, records: Records, serving: Serving) -> list[Any]:
    """Return the objects of the list and of the playground."""
    listed = records.adapter_list
    return [
        AdapterListPage(frame=frame, adapters=listed, registry=serving.registry, bases=records.bases),
        PlaygroundPages(frame=frame, tenants=records.tenants, adapters=listed, bases=records.bases),
    ]


def build_adapter_page(
    frame: Frame, resources: Resources, records: Records, billing: Billing, serving: Serving, parts: AdapterParts
) -> list[Any]:
    """Return the objects of an adapter's page."""
    database, tenants, catalog = resources.database, records.tenants, records.catalog
    pages = AdapterPages(
        frame=frame,
        tenants=tenants,
        catalog=catalog,
        reports=Reports(Uploads(database), Probes(database), Golden(database)),
        uses=records.adapter_uses,
        activity=Activity(database, timedelta(hours=resources.settings.minute_sums_hours)),
        operator_prefetch=serving.operator_prefetch,
        reads=parts.uses.reads,
    )
    acts = AdapterActs(
        frame=frame,
        tenants=tenants,
        catalog=catalog,
        quota=billing.quota,
        validation=parts.intake.validation,
        checks=parts.checks,
        versions=parts.versions,
        uses=parts.uses,
    )
    uploads = AdapterUploads(frame=frame, tenants=tenants, auth=records.auth, quota=billing.quota, intake=parts.intake)
    return [pages, acts, uploads]
