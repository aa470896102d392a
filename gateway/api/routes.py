"""Routes of the API, by the class that has their handlers; `gateway/route_table.py` adds those of the pages."""

from functools import partial

from gateway.api.adapters.handlers import TenantAdapter, TenantAdapterList
from gateway.api.adapters.routes import ADAPTER_ROUTES
from gateway.api.admin.alerts import AdminWebhooks, DeletedWebhook, EventPage, ShownWebhook, WebhookList, WebhookTest
from gateway.api.admin.audit import AdminAudit, AuditPage
from gateway.api.admin.fleet_routes import FLEET_ROUTES
from gateway.api.admin.keys import LIST_QUERY as KEY_LIST
from gateway.api.admin.keys import KeyRoutes
from gateway.api.admin.refusals import QUERY as REFUSALS
from gateway.api.admin.refusals import AdminRefusals, RefusalsAnswer
from gateway.api.admin.routes import Admin, Collection, GatewayVersion, QueueAnswer
from gateway.api.admin.search import AdminSearch, SearchResult
from gateway.api.admin.sessions import AdminSessions, EndedSession, SessionList
from gateway.api.admin.settings import AdminSettings, SettingsAnswer
from gateway.api.admin.tenant_routes import TENANT_ROUTES
from gateway.api.description import Description
from gateway.api.engines import Announcement, Engines
from gateway.api.health import HealthRoutes, Live, MetricsPage, Readiness
from gateway.api.home import Home, Service
from gateway.api.inference.completions import Completions
from gateway.api.key import KeyInfo, OwnKey
from gateway.api.key_manager import KeyChanges, KeyList, NewAdminKey, RevokedKey, Rotation, ShownKey
from gateway.api.models import Models
from gateway.api.reports.routes import REPORTS
from gateway.api.reports.usage import Usage, UsageAnswer
from gateway.api.reports.usage_export import FILES, ROWS_QUERY, ExportedRow, ExportedSums, UsageExport
from gateway.api.reports.usage_export import QUERY as EXPORT_QUERY
from gateway.api.route import ADDED, PUT, Route, Upload
from gateway.api.route_groups import key_routes
from gateway.api.webhook_manager import NewWebhook
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.responses import ChatCompletion, Completion, Model, ModelList

REPORT = ("since", "until", "group_by", "limit", "after")
TENANT = "/admin/api/tenants/{tenant}"
KEY = "/admin/api/keys/{id}"
WEBHOOK = "/admin/api/webhooks/{name}"

# Route of the admin API, which takes no query parameters unless `query` lists them.
_admin = partial(Route, scope="admin", query=())


API: dict[type, tuple[Route, ...]] = {
    Completions: (
        Route(
            "POST",
            "/v1/chat/completions",
            Completions.chat,
            "Answer a chat.",
            scope="inference",
            request=ChatCompletionRequest,
            response=ChatCompletion,
            streams=True,
        ),
        Route(
            "POST",
            "/v1/completions",
            Completions.completions,
            "Continue a text.",
            scope="inference",
            request=CompletionRequest,
            response=Completion,
            streams=True,
        ),
    ),
    Models: (
        Route(
            "GET",
            "/v1/models",
            Models.list,
            "List the base models, and the tenant's adapters and saved mixtures.",
            scope="inference",
            response=ModelList,
        ),
        Route("GET", "/v1/models/{name:.+}", Models.get, "Return a model.", scope="inference", response=Model),
    ),
    **ADAPTER_ROUTES,
    OwnKey: (
        Route(
            "GET",
            "/v1/key",
            OwnKey.get,
            "Return the key of the request, and what is left of its limits.",
            scope="any",
            query=(),
            response=KeyInfo,
        ),
    ),
    Usage: (
        Route(
            "GET",
            "/v1/usage",
            Usage.get,
            "Report the tenant's usage.",
            scope="usage",
            query=REPORT,
            response=UsageAnswer,
        ),
    ),
    Admin: (
        _admin(
            "POST",
            f"{TENANT}/adapters",
            Admin.push_adapter,
            "Upload an adapter for a tenant.",
            request=Upload,
            response=TenantAdapter,
            statuses=ADDED,
        ),
        _admin(
            "GET", f"{TENANT}/adapters", Admin.list_adapters, "List a tenant's adapters.", response=TenantAdapterList
        ),
        _admin(
            "POST",
            "/admin/api/adapters/collect",
            Admin.collect,
            "Remove adapters that no name refers to.",
            query=("dry_run",),
            response=Collection,
        ),
        _admin(
            "GET",
            "/admin/api/usage",
            Admin.usage,
            "Report the usage of tenants.",
            query=("tenant", *REPORT),
            response=UsageAnswer,
        ),
        _admin("GET", "/admin/api/version", Admin.version, "Return the gateway's version.", response=GatewayVersion),
        _admin(
            "GET",
            "/admin/api/queue",
            Admin.queue,
            "Show each tenant's requests, service and share.",
            response=QueueAnswer,
        ),
    ),
    AdminRefusals: (
        _admin(
            "GET",
            "/admin/api/refusals",
            AdminRefusals.get,
            "Report why requests were refused.",
            query=REFUSALS,
            response=RefusalsAnswer,
        ),
    ),
    UsageExport: (
        _admin(
            "GET",
            "/admin/api/usage/export",
            UsageExport.get,
            "Return a file of usage.",
            query=EXPORT_QUERY,
            response=list[ExportedSums],
            files=FILES,
        ),
        _admin(
            "GET",
            "/admin/api/usage/rows",
            UsageExport.rows,
            "Return a file of usage rows.",
            query=ROWS_QUERY,
            response=list[ExportedRow],
            files=FILES,
        ),
    ),
    Engines: (
        Route(
            "POST",
            "/internal/engines",
            Engines.announce,
            "Announce an engine.",
            request=Announcement,
            response=None,
            statuses=(204,),
        ),
        Route(
            "DELETE",
            "/internal/engines",
            Engines.withdraw,
            "Withdraw an engine.",
            request=Announcement,
            response=None,
            statuses=(204,),
        ),
    ),
    **FLEET_ROUTES,
    **REPORTS,
    AdminAudit: (
        _admin(
            "GET",
            "/admin/api/audit",
            AdminAudit.list,
            "List changes, with their actors.",
            query=("tenant", "actor", "action", "not_action", "since", "until", "limit", "after"),
            response=AuditPage,
        ),
    ),
    AdminWebhooks: (
        _admin("GET", "/admin/api/webhooks", AdminWebhooks.list, "List the webhooks.", response=WebhookList),
        _admin("GET", WEBHOOK, AdminWebhooks.get, "Return a webhook.", response=ShownWebhook),
        _admin(
            "PUT",
            WEBHOOK,
            AdminWebhooks.put,
            "Add or change a webhook.",
            request=NewWebhook,
            response=ShownWebhook,
            statuses=PUT,
        ),
        _admin("DELETE", WEBHOOK, AdminWebhooks.delete, "Delete a webhook.", response=DeletedWebhook),
        _admin("POST", f"{WEBHOOK}/test", AdminWebhooks.test, "Send a test event to a webhook.", response=WebhookTest),
        _admin(
            "GET",
            "/admin/api/events",
            AdminWebhooks.list_events,
            "List events, with their deliveries.",
            query=("tenant", "type", "since", "until", "limit", "after"),
            response=EventPage,
        ),
    ),
    **TENANT_ROUTES,
    AdminSearch: (
        _admin(
            "GET",
            "/admin/api/search",
            AdminSearch.get,
            "Find tenants, adapters and keys.",
            query=("q",),
            response=SearchResult,
        ),
    ),
    KeyRoutes: (
        *key_routes("/v1/keys", partial(Route, scope="keys", query=())),
        *key_routes(f"{TENANT}/keys", _admin)[:2],
        _admin(
            "POST",
            "/admin/api/keys",
            KeyRoutes.create_admin,
            "Create an admin key; only this answer contains it.",
            request=NewAdminKey,
            response=ShownKey,
            statuses=(201,),
        ),
        _admin(
            "GET",
            "/admin/api/keys",
            KeyRoutes.list_admin,
            "List admin keys, or all keys.",
            query=KEY_LIST,
            response=KeyList,
        ),
        _admin(
            "POST",
            f"{KEY}/rotate",
            KeyRoutes.rotate_any,
            "Replace a key.",
            request=Rotation,
            response=ShownKey,
            statuses=(201,),
        ),
        _admin(
            "PATCH",
            KEY,
            KeyRoutes.change_any,
            "Change the label and limits of a key.",
            request=KeyChanges,
            response=ShownKey,
        ),
        _admin("DELETE", KEY, KeyRoutes.revoke_any, "Revoke a key.", response=RevokedKey),
    ),
    AdminSessions: (
        _admin(
            "GET",
            "/admin/api/sessions",
            AdminSessions.list,
            "List the sessions of browsers.",
            query=("tenant", "limit"),
            response=SessionList,
        ),
        _admin("DELETE", "/admin/api/sessions/{id}", AdminSessions.end, "End a session.", response=EndedSession),
    ),
    AdminSettings: (
        _admin(
            "GET",
            "/admin/api/settings",
            AdminSettings.get,
            "Return the settings without secrets, and the state.",
            response=SettingsAnswer,
        ),
    ),
    Home: (Route("GET", "/", Home.get, "Return the service's addresses.", is_open=True, response=Service),),
    Description: (Route("GET", "/openapi.json", Description.get, "Return this description.", is_open=True),),
    HealthRoutes: (
        Route("GET", "/healthz", HealthRoutes.live, "Return whether the process runs.", is_open=True, response=Live),
        Route(
            "GET",
            "/readyz",
            HealthRoutes.ready,
            "Return whether requests can be served.",
            is_open=True,
            query=("strict",),
            response=Readiness,
        ),
    ),
    MetricsPage: (
        Route("GET", "/metrics", MetricsPage.get, "Return Prometheus metrics.", scope="admin", response=None),
    ),
}
