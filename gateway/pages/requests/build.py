"""Construction of the pages of requests and refusals."""

from datetime import timedelta
from typing import Any

from gateway.api.admin.refusals import AdminRefusals
from gateway.components import Records
from gateway.pages.frame.frame import Frame
from gateway.pages.requests.log import RequestPages
from gateway.pages.requests.refusals import RefusalPages
from gateway.records.requests.refusal_report import RefusalReport
from gateway.resources import Resources


def build_request_pages(frame: Frame, resources: Resources, records: Records) -> list[Any]:
    """Return the objects of these pages, and that of the JSON route of refusals."""
    settings = resources.settings
    refusals = RefusalReport(resources.database, timedelta(hours=settings.minute_sums_hours))
    return [
        AdminRefusals(report=refusals),
        RequestPages(frame, records.request_log, settings.currency, settings.trace_url),
        RefusalPages(frame, refusals, settings.currency),
    ]
