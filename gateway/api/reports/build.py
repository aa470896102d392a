"""Construction of the routes that report: usage, the request log, the activity and remaining limits."""

from datetime import timedelta
from typing import Any

from gateway.api.admin.tenant_limits import TenantLimits
from gateway.api.key import OwnKey
from gateway.api.reports.activity import ActivityRoutes
from gateway.api.reports.request_log import RequestLogRoutes
from gateway.api.reports.usage import Usage
from gateway.api.reports.usage_pruning import UsagePruning
from gateway.billing.activity_rebuild import ActivityRebuild
from gateway.components import Billing, Records
from gateway.records.maintenance.retention import Retention
from gateway.resources import Resources


def build_reports(resources: Resources, records: Records, billing: Billing) -> list[Any]:
    """Return the objects of these routes."""
    quota, currency = billing.quota, resources.settings.currency
    return [
        Usage(report=records.report, currency=currency),
        RequestLogRoutes(log=records.request_log, currency=currency),
        ActivityRoutes(activity=records.activity, currency=currency),
        OwnKey(quota=quota, currency=currency),
        TenantLimits(tenants=records.tenants, quota=quota, currency=currency),
        UsagePruning(
            retention=Retention(resources.database),
            rebuild=ActivityRebuild(resources.database, timedelta(hours=resources.settings.minute_sums_hours)),
            audit=records.audit,
            currency=currency,
        ),
    ]
