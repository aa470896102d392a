"""Routes of the request log and the activity, a part of the table in `gateway/api/routes.py`."""

from collections.abc import Mapping

from gateway.api.reports.audit import QUERY as AUDIT_QUERY
from gateway.api.reports.audit import OwnAudit
from gateway.api.reports.request_log import ActivityRoutes, RequestLogRoutes
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
        ),
        Route(
            "GET",
            "/admin/api/requests/{id}",
            RequestLogRoutes.get,
            "Return the story of a request.",
            scope="admin",
            query=(),
        ),
        Route(
            "GET",
            "/v1/requests",
            RequestLogRoutes.list_own,
            "List the tenant's requests, refused ones too.",
            scope="usage",
            query=FILTERS,
        ),
        Route(
            "GET",
            "/v1/requests/{id}",
            RequestLogRoutes.get_own,
            "Return the story of a tenant's request.",
            scope="usage",
            query=(),
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
        ),
    ),
}
