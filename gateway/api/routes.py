"""Table of all routes: source of the application's routes, `/openapi.json`, and the checks of scopes and parameters."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from gateway.access.scopes import Guards
from gateway.api.adapters.routes import ADAPTER_ROUTES
from gateway.api.admin.alerts import AdminWebhooks
from gateway.api.admin.audit import AdminAudit
from gateway.api.admin.bases import AdminBases, BaseChanges, NewBase
from gateway.api.admin.engines import AdminEngines, EngineList, EngineUrl, ShownEngine
from gateway.api.admin.fleet_views import FleetViews
from gateway.api.admin.keys import LIST_QUERY as KEY_LIST
from gateway.api.admin.keys import KeyRoutes
from gateway.api.admin.plans import AdminPlans, DeletedPlan, NewPlan, PlanList, PlanPrices, ShownPlan
from gateway.api.admin.prices import AdminPrices, DeletedPrice, NewPrice, ShownPrice, ShownPrices
from gateway.api.admin.refusals import QUERY as REFUSALS
from gateway.api.admin.refusals import AdminRefusals, RefusalsAnswer
from gateway.api.admin.routes import Admin
from gateway.api.admin.search import AdminSearch, SearchResult
from gateway.api.admin.sessions import AdminSessions
from gateway.api.admin.settings import AdminSettings
from gateway.api.admin.tenant_bulk import AdminTenantBulk, BulkPreview, BulkResult, NewBulk
from gateway.api.admin.tenants import (
    AdminTenants,
    DeletedTenant,
    ListedTenant,
    NewTenant,
    ShownTenant,
    TenantChanges,
    TenantList,
)
from gateway.api.description import Description
from gateway.api.engines import Announcement, Engines
from gateway.api.health import HealthRoutes, MetricsPage
from gateway.api.home import Home
from gateway.api.inference.completions import Completions
from gateway.api.key import KeyInfo, OwnKey
from gateway.api.key_manager import KeyChanges, KeyList, NewAdminKey, RevokedKey, Rotation, ShownKey
from gateway.api.models import Models
from gateway.api.reports.routes import REPORTS
from gateway.api.reports.usage import Usage, UsageAnswer
from gateway.api.reports.usage_export import QUERY as EXPORT_QUERY
from gateway.api.reports.usage_export import ROWS_QUERY, UsageExport
from gateway.api.route import Route, Upload
from gateway.api.route_groups import FORCE, key_routes
from gateway.api.webhook_manager import NewWebhook
from gateway.pages.routes import PAGES
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.responses import ChatCompletion, Completion, Model, ModelList

TENANT_LIST = ("plan", "tag", "suspended", "over_budget", "q", "idle_days", "sort", "order", "limit", "after")
REPORT = ("since", "until", "group_by", "limit", "after")
TENANT = "/admin/api/tenants/{tenant}"
PLAN = "/admin/api/plans/{plan}"
KEY = "/admin/api/keys/{id}"
WEBHOOK = "/admin/api/webhooks/{name}"

# Route of the admin API, which takes no query parameters unless `query` lists them.
_admin = partial(Route, scope="admin", query=())


# Routes by the class that has their handlers, without those of the pages.
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
        _admin("POST", f"{TENANT}/adapters", Admin.push_adapter, "Upload an adapter for a tenant.", request=Upload),
        _admin("GET", f"{TENANT}/adapters", Admin.list_adapters, "List a tenant's adapters."),
        _admin(
            "POST",
            "/admin/api/adapters/collect",
            Admin.collect,
            "Remove adapters that no name refers to.",
            query=("dry_run",),
        ),
        _admin(
            "GET",
            "/admin/api/usage",
            Admin.usage,
            "Report the usage of tenants.",
            query=("tenant", *REPORT),
            response=UsageAnswer,
        ),
        _admin("GET", "/admin/api/version", Admin.version, "Return the gateway's version."),
        _admin("GET", "/admin/api/queue", Admin.queue, "Show each tenant's requests, service and share."),
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
        _admin("GET", "/admin/api/usage/export", UsageExport.get, "Return a file of usage.", query=EXPORT_QUERY),
        _admin("GET", "/admin/api/usage/rows", UsageExport.rows, "Return a file of usage rows.", query=ROWS_QUERY),
    ),
    Engines: (
        Route("POST", "/internal/engines", Engines.announce, "Announce an engine.", request=Announcement),
        Route("DELETE", "/internal/engines", Engines.withdraw, "Withdraw an engine.", request=Announcement),
    ),
    AdminEngines: (
        _admin(
            "GET", "/admin/api/engines", AdminEngines.list, "List the engines and their health.", response=EngineList
        ),
        _admin(
            "POST",
            "/admin/api/engines/drain",
            AdminEngines.drain,
            "Stop new requests to an engine.",
            request=EngineUrl,
            response=ShownEngine,
        ),
        _admin(
            "POST",
            "/admin/api/engines/resume",
            AdminEngines.resume,
            "Send new requests to a drained engine again.",
            request=EngineUrl,
        ),
    ),
    FleetViews: (
        _admin(
            "GET", "/admin/api/engines/history", FleetViews.history, "Return an engine's last hour.", query=("url",)
        ),
        _admin(
            "GET",
            "/admin/api/residency",
            FleetViews.residency,
            "Return where adapters are resident.",
            query=("q", "limit", "page"),
        ),
    ),
    **REPORTS,
    AdminAudit: (
        _admin(
            "GET",
            "/admin/api/audit",
            AdminAudit.list,
            "List changes, with their actors.",
            query=("tenant", "actor", "action", "not_action", "since", "until", "limit", "after"),
        ),
    ),
    AdminPlans: (
        _admin("GET", "/admin/api/plans", AdminPlans.list, "List the plans.", response=PlanList),
        _admin("GET", PLAN, AdminPlans.get, "Return a plan.", response=ShownPlan),
        _admin("PUT", PLAN, AdminPlans.put, "Create or replace a plan.", request=NewPlan, response=ShownPlan),
        _admin(
            "PUT",
            f"{PLAN}/prices",
            AdminPlans.put_prices,
            "Replace the prices of a plan.",
            role="billing",
            request=PlanPrices,
            response=ShownPlan,
        ),
        _admin("DELETE", PLAN, AdminPlans.delete, "Delete a plan that no tenant has.", response=DeletedPlan),
    ),
    AdminBases: (
        _admin("GET", "/admin/api/bases", AdminBases.list, "List base models with their engines and adapters."),
        _admin("POST", "/admin/api/bases", AdminBases.add, "Add a base model.", request=NewBase),
        _admin(
            "PATCH",
            "/admin/api/bases/{name:.+}",
            AdminBases.change,
            "Drain, resume, retire or replace a base model.",
            query=FORCE,
            request=BaseChanges,
        ),
    ),
    AdminWebhooks: (
        _admin("GET", "/admin/api/webhooks", AdminWebhooks.list, "List the webhooks."),
        _admin("GET", WEBHOOK, AdminWebhooks.get, "Return a webhook."),
        _admin("PUT", WEBHOOK, AdminWebhooks.put, "Add or change a webhook.", request=NewWebhook),
        _admin("DELETE", WEBHOOK, AdminWebhooks.delete, "Delete a webhook."),
        _admin("POST", f"{WEBHOOK}/test", AdminWebhooks.test, "Send a test event to a webhook."),
        _admin(
            "GET",
            "/admin/api/events",
            AdminWebhooks.list_events,
            "List events, with their deliveries.",
            query=("tenant", "type", "since", "until", "limit", "after"),
        ),
    ),
    AdminPrices: (
        _admin("GET", "/admin/api/prices", AdminPrices.list, "List the prices of tokens.", response=ShownPrices),
        _admin(
            "PUT",
            "/admin/api/prices/{model:.+}",
            AdminPrices.put,
            "Set a model's price.",
            role="billing",
            query=FORCE,
            request=NewPrice,
            response=ShownPrice,
        ),
        _admin(
            "DELETE",
            "/admin/api/prices/{model:.+}",
            AdminPrices.delete,
            "Remove a model's price.",
            role="billing",
            response=DeletedPrice,
        ),
    ),
    AdminTenants: (
        _admin(
            "POST",
            "/admin/api/tenants",
            AdminTenants.create,
            "Create a tenant.",
            query=FORCE,
            request=NewTenant,
            response=ShownTenant,
        ),
        _admin("GET", "/admin/api/tenants", AdminTenants.list, "List tenants.", query=TENANT_LIST, response=TenantList),
        _admin("GET", TENANT, AdminTenants.get, "Return a tenant.", response=ListedTenant),
        _admin(
            "PATCH",
            TENANT,
            AdminTenants.update,
            "Change a tenant.",
            role="billing",
            query=FORCE,
            request=TenantChanges,
            response=ShownTenant,
        ),
        _admin("DELETE", TENANT, AdminTenants.delete, "Delete a tenant; its usage is kept.", response=DeletedTenant),
    ),
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
    AdminTenantBulk: (
        _admin(
            "POST",
            "/admin/api/tenants/bulk",
            AdminTenantBulk.change,
            "Change all tenants that match.",
            query=("dry_run",),
            request=NewBulk,
            response=(BulkPreview, BulkResult),
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
        ),
        _admin("DELETE", "/admin/api/sessions/{id}", AdminSessions.end, "End a session."),
    ),
    AdminSettings: (
        _admin("GET", "/admin/api/settings", AdminSettings.get, "Return the settings without secrets, and the state."),
    ),
    Home: (Route("GET", "/", Home.get, "Return the service's addresses.", is_open=True),),
    Description: (Route("GET", "/openapi.json", Description.get, "Return this description.", is_open=True),),
    HealthRoutes: (
        Route("GET", "/healthz", HealthRoutes.live, "Return whether the process runs.", is_open=True),
        Route(
            "GET",
            "/readyz",
            HealthRoutes.ready,
            "Return whether requests can be served.",
            is_open=True,
            query=("strict",),
        ),
    ),
    MetricsPage: (
        Route("GET", "/metrics", MetricsPage.get, "Return Prometheus metrics.", scope="admin", response=None),
    ),
}
TABLE = API | PAGES
ROUTES = tuple(route for routes in TABLE.values() for route in routes)
PARAMETERS = {(route.method, route.canonical): route.query for route in ROUTES if route.query is not None}


def add_routes(app: web.Application, objects: Mapping[type, Any], guards: Guards) -> None:
    """Add the routes of every class in `objects`."""
    for kind, routes in TABLE.items():
        if kind in objects:
            for route in routes:
                handler = route.handler.__get__(objects[kind])
                if route.scope is not None:
                    handler = guards.guarded(handler, route.scope, route.least_role)
                if route.method == "GET":
                    # `add_get` also answers HEAD.
                    app.router.add_get(route.path, handler)
                else:
                    app.router.add_route(route.method, route.path, handler)
