"""Construction of the pages of plans, prices and usage."""

from typing import Any

from gateway.api.reports.usage_export import UsageExport
from gateway.components import Records
from gateway.pages.frame.frame import Frame
from gateway.pages.money.plans import PlanPages
from gateway.pages.money.prices import PricePages
from gateway.pages.money.usage import UsagePages
from gateway.records.usage.ranking import UsageRanking
from gateway.resources import Resources


def build_money_pages(frame: Frame, resources: Resources, records: Records) -> list[Any]:
    """Return the objects of these pages, and that of the JSON route of exports."""
    currency = resources.settings.currency
    export = UsageExport(records.report, currency)
    return [
        export,
        PlanPages(frame, records, currency),
        PricePages(frame, records),
        UsagePages(frame, UsageRanking(resources.database), export, currency),
    ]
