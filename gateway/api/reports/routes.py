"""Routes of reports, limits and the removal of usage; a part of the table in `gateway/api/routes.py`."""

from collections.abc import Mapping

from gateway.api.admin.tenant_limits import TenantLimits, TenantLimitsLeft
from gateway.api.reports.activity import ActivityAnswer, ActivityRoutes
from gateway.api.reports.audit import QUERY as AUDIT_QUERY
from gateway.api.reports.audit import OwnAudit, OwnAuditPage
from gateway.api.reports.request_log import (
    OwnRequestPage,
    OwnRequestStory,
    RequestLogRoutes,
    RequestPage,
    RequestStory,
)
from gateway.api.reports.usage_pruning import NewPruning, Pruned, UsagePruning
from gateway.api.route import Route

FILTERS = (
    *("key", "model", "version", "status", "code", "limit_name", "end_user", "min_latency_ms"),
    *("since", "until", "limit", "after"),
)
REPORTS: Mapping[type, tuple[Route, ...]] = {
    RequestLogRoutes: (
        Route(
            "GET",
            "/admin/api/requests",
            RequestLogRoutes.list,
            "List requests, refused ones too.",
            scope="admin",
            query=("tenant", "engine", *FILTERS),
            response=RequestPage,
        ),
        Route(
            "GET",
            "/admin/api/requests/{id}",
            RequestLogRoutes.get,
            "Return the story of a request.",
            scope="admin",
            query=(),
            response=RequestStory,
        ),
        Route(
            "GET",
            "/v1/requests",
            RequestLogRoutes.list_own,
            "List the tenant's requests, refused ones too.",
            scope="usage",
            query=FILTERS,
            response=OwnRequestPage,
        ),
        Route(
            "GET",
            "/v1/requests/{id}",
            RequestLogRoutes.get_own,
            "Return the story of a tenant's request.",
            scope="usage",
            query=(),
            response=OwnRequestStory,
        ),
    ),
    OwnAudit: (
        Route(
            "GET",
            "/v1/audit",
            OwnAudit.list,
            "List changes of the tenant's records, with their actors.",
            scope="keys",
            query=AUDIT_QUERY,
            response=OwnAuditPage,
        ),
    ),
    ActivityRoutes: (
        Route(
            "GET",
            "/admin/api/activity",
            ActivityRoutes.get,
            "Report the activity of a period, for charts.",
            scope="admin",
            query=("since", "until", "tenant", "model", "engine", "group_by", "order", "limit", "step"),
            response=ActivityAnswer,
        ),
    ),
    TenantLimits: (
        Route(
            "GET",
            "/admin/api/tenants/{tenant}/limits",
            TenantLimits.get,
            "Return what is left of a tenant's limits.",
            scope="admin",
            query=(),
            response=TenantLimitsLeft,
        ),
    ),
    UsagePruning: (
        Route(
            "POST",
            "/admin/api/usage/prune",
            UsagePruning.prune,
            "Remove usage rows of the days before a date; sums stay.",
            scope="admin",
            query=("dry_run",),
            request=NewPruning,
            response=Pruned,
        ),
    ),
}
