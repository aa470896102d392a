"""Construction of the pages of requests, refusals and usage."""

from datetime import timedelta
from typing import Any

from gateway.api.admin.refusals import AdminRefusals
from gateway.api.usage_export import UsageExport
from gateway.pages.frame import Frame
from gateway.pages.refusals import RefusalPages
from gateway.pages.requests import RequestPages
from gateway.pages.search import SearchPage
from gateway.pages.usage import UsagePages
from gateway.parts import Records
from gateway.records.refusal_report import RefusalReport
from gateway.records.search import Search
from gateway.records.usage_ranking import UsageRanking
from gateway.resources import Resources


def build_report_pages(frame: Frame, resources: Resources, records: Records) -> list[Any]:
    """Return the objects of these pages, and of their JSON routes."""
    settings, database = resources.settings, resources.database
    export = UsageExport(records.report, settings.currency)
    refusals = RefusalReport(database, timedelta(hours=settings.minute_sums_hours))
    return [
        export,
        AdminRefusals(report=refusals),
        RequestPages(frame, records.request_log, settings.currency),
        RefusalPages(frame, refusals, settings.currency),
        UsagePages(frame, UsageRanking(database), export, settings.currency),
        SearchPage(frame, Search(database)),
    ]
