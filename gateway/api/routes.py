"""Table of all routes: source of the application's routes, `/openapi.json`, and the checks of scopes and parameters."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from gateway.access.auth import Authenticator
from gateway.access.scopes import guarded
from gateway.api.adapters import Adapters
from gateway.api.admin.audit import AdminAudit
from gateway.api.admin.keys import AdminKeys, NewAdminKey, NewKey, Rotation
from gateway.api.admin.prices import AdminPrices, NewPrice
from gateway.api.admin.routes import Admin
from gateway.api.admin.tenants import AdminTenants, NewTenant, TenantChanges
from gateway.api.completions import Completions
from gateway.api.dashboard import Dashboard
from gateway.api.description import Description
from gateway.api.engines import Announcement, Engines
from gateway.api.golden.handlers import GoldenRoutes, NewGolden
from gateway.api.health import Health, MetricsPage
from gateway.api.models import Models
from gateway.api.probes import ProbeRoutes
from gateway.api.route import Route, Upload
from gateway.api.saved_mixtures import NewMixture, SavedMixtureRoutes
from gateway.api.uploads.importing import Imports
from gateway.api.uploads.resumable import ResumableUploads
from gateway.api.usage import Usage
from gateway.api.versions import AdapterVersions, NewTargets, VersionChanges
from gateway.sharing.rounds import Rounds
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.responses import ChatCompletion, Completion, Model, ModelList

FORCE = ("force",)
REPORT = ("since", "until", "group_by", "limit", "after")
TENANT = "/admin/api/tenants/{tenant}"

# Route of the admin API, which takes no query parameters unless `query` lists them.
_admin = partial(Route, scope="admin", query=())


def _upload_routes(path: str, route: Callable[..., Route]) -> tuple[Route, ...]:
    one = f"{path}/{{id}}"
    return (
        route("POST", path, ResumableUploads.begin, "Begin or resume an upload.", query=("name", "size", "sha256")),
        route("GET", one, ResumableUploads.get, "Return how much of an upload has arrived.", query=()),
        route("PUT", one, ResumableUploads.put, "Send a part of an upload.", query=("offset", "sha256")),
        route("POST", f"{one}/complete", ResumableUploads.complete, "Check the upload and add the version.", query=()),
        route("DELETE", one, ResumableUploads.abort, "Abort an upload.", query=()),
    )


def _version_routes(path: str, route: Callable[..., Route]) -> tuple[Route, ...]:
    name = f"{path}/{{name}}"
    version, alias = f"{name}/versions/{{version}}", f"{name}/aliases/{{alias}}"
    of = AdapterVersions
    return (
        route("DELETE", name, of.delete, "Delete an adapter's name with its versions.", query=FORCE),
        route("GET", f"{name}/versions", of.list, "List an adapter's versions.", query=()),
        route("GET", version, of.get, "Return a version.", query=()),
        route("PATCH", version, of.change, "Retire, expire or pin a version.", query=FORCE, request=VersionChanges),
        route("DELETE", version, of.delete, "Delete a version.", query=FORCE),
        route("GET", f"{name}/aliases", of.list_aliases, "List an adapter's aliases.", query=()),
        route("GET", alias, of.get_alias, "Return an alias and its ETag.", query=()),
        route("PUT", alias, of.move, "Point an alias to versions.", query=(), request=NewTargets),
        route("POST", f"{alias}/rollback", of.rollback, "Roll an alias back to its previous versions.", query=()),
        route("DELETE", alias, of.delete_alias, "Delete an alias.", query=()),
    )


def _golden_routes(path: str, route: Callable[..., Route], check_query: tuple[str, ...]) -> tuple[Route, ...]:
    one, of = f"{path}/{{name}}/versions/{{version}}/golden", GoldenRoutes
    return (
        route("GET", one, of.get, "Return a version's golden answers and their checks.", query=()),
        route("PUT", one, of.put, "Ask prompts and keep the golden answers.", query=(), request=NewGolden),
        route("DELETE", one, of.delete, "Remove a version's golden answers.", query=()),
        route("POST", f"{one}/check", of.check, "Check a version's golden answers.", query=check_query),
    )


def _mixture_routes(path: str, route: Callable[..., Route]) -> tuple[Route, ...]:
    name, of = f"{path}/{{name}}", SavedMixtureRoutes
    return (
        route("GET", path, of.list, "List saved mixtures.", query=()),
        route("GET", name, of.get, "Return a saved mixture and its ETag.", query=()),
        route("PUT", name, of.save, "Save a mixture under a name.", query=(), request=NewMixture),
        route("DELETE", name, of.delete, "Delete a saved mixture.", query=()),
    )


# Routes by the class that has their handlers.
TABLE: Mapping[type, tuple[Route, ...]] = {
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
            "List the base model, and the tenant's adapters and saved mixtures.",
            scope="inference",
            response=ModelList,
        ),
        Route("GET", "/v1/models/{name:.+}", Models.get, "Return a model.", scope="inference", response=Model),
    ),
    Adapters: (
        Route(
            "POST",
            "/v1/adapters",
            Adapters.push,
            "Upload an adapter, or its next version.",
            scope="adapters",
            request=Upload,
        ),
        Route("GET", "/v1/adapters", Adapters.list, "List the tenant's adapters.", scope="adapters"),
        Route("GET", "/v1/adapters/{name}", Adapters.get, "Return an adapter.", scope="adapters"),
    ),
    AdapterVersions: _version_routes("/v1/adapters", partial(Route, scope="adapters"))
    + _version_routes(f"{TENANT}/adapters", partial(Route, scope="admin")),
    SavedMixtureRoutes: _mixture_routes("/v1/mixtures", partial(Route, scope="adapters"))
    + _mixture_routes(f"{TENANT}/mixtures", partial(Route, scope="admin")),
    ResumableUploads: _upload_routes("/v1/adapter-uploads", partial(Route, scope="adapters"))
    + _upload_routes(f"{TENANT}/adapter-uploads", partial(Route, scope="admin")),
    Imports: (
        Route(
            "POST",
            "/v1/adapter-imports",
            Imports.add,
            "Import an adapter from an allowed place.",
            scope="adapters",
            query=("name", "source"),
        ),
        _admin(
            "POST",
            f"{TENANT}/adapter-imports",
            Imports.add,
            "Import an adapter for a tenant.",
            query=("name", "source"),
        ),
    ),
    ProbeRoutes: (
        Route(
            "GET",
            "/v1/adapters/{name}/versions/{version}/probe",
            ProbeRoutes.get,
            "Return the probe of a version.",
            scope="adapters",
        ),
        _admin(
            "GET",
            f"{TENANT}/adapters/{{name}}/versions/{{version}}/probe",
            ProbeRoutes.get,
            "Return the probe of a version.",
        ),
        Route(
            "POST",
            "/v1/adapters/{name}/versions/{version}/probe",
            ProbeRoutes.verify,
            "Probe a version again.",
            scope="adapters",
        ),
        _admin(
            "POST",
            f"{TENANT}/adapters/{{name}}/versions/{{version}}/probe",
            ProbeRoutes.verify,
            "Probe a tenant's version again.",
            query=("engine",),
        ),
        _admin("GET", "/admin/api/bases", ProbeRoutes.bases, "List base models with their engines and adapters."),
    ),
    GoldenRoutes: _golden_routes("/v1/adapters", partial(Route, scope="adapters"), ())
    + _golden_routes(f"{TENANT}/adapters", partial(Route, scope="admin"), ("engine",)),
    Usage: (Route("GET", "/v1/usage", Usage.get, "Report the tenant's usage.", scope="usage", query=REPORT),),
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
        _admin("GET", "/admin/api/usage", Admin.usage, "Report the usage of tenants.", query=("tenant", *REPORT)),
        _admin("GET", "/admin/api/engines", Admin.engines, "List the engines and their health."),
        _admin("GET", "/admin/api/queue", Admin.queue, "Show each tenant's requests, service and share."),
    ),
    Engines: (
        Route("POST", "/internal/engines", Engines.announce, "Announce an engine.", request=Announcement),
        Route("DELETE", "/internal/engines", Engines.withdraw, "Withdraw an engine.", request=Announcement),
    ),
    AdminAudit: (
        _admin(
            "GET",
            "/admin/api/audit",
            AdminAudit.list,
            "List changes, with their actors.",
            query=("tenant", "actor", "action", "since", "until", "limit", "after"),
        ),
    ),
    AdminPrices: (
        _admin("GET", "/admin/api/prices", AdminPrices.list, "List the prices of tokens."),
        _admin(
            "PUT",
            "/admin/api/prices/{model:.+}",
            AdminPrices.put,
            "Set a model's price.",
            query=FORCE,
            request=NewPrice,
        ),
        _admin("DELETE", "/admin/api/prices/{model:.+}", AdminPrices.delete, "Remove a model's price."),
    ),
    AdminTenants: (
        _admin(
            "POST",
            "/admin/api/tenants",
            AdminTenants.create,
            "Create a tenant.",
            query=FORCE,
            request=NewTenant,
        ),
        _admin("GET", "/admin/api/tenants", AdminTenants.list, "List all tenants."),
        _admin("GET", TENANT, AdminTenants.get, "Return a tenant."),
        _admin("PATCH", TENANT, AdminTenants.update, "Change a tenant.", query=FORCE, request=TenantChanges),
        _admin("DELETE", TENANT, AdminTenants.delete, "Delete a tenant; its usage is kept."),
    ),
    AdminKeys: (
        _admin(
            "POST",
            f"{TENANT}/keys",
            AdminKeys.create,
            "Create an API key; only this answer contains it.",
            query=FORCE,
            request=NewKey,
        ),
        _admin("GET", f"{TENANT}/keys", AdminKeys.list, "List a tenant's keys."),
        _admin(
            "POST",
            "/admin/api/keys",
            AdminKeys.create_admin,
            "Create an admin key; only this answer contains it.",
            request=NewAdminKey,
        ),
        _admin("GET", "/admin/api/keys", AdminKeys.list_admin, "List the admin keys."),
        _admin("POST", "/admin/api/keys/{id}/rotate", AdminKeys.rotate, "Replace a key.", request=Rotation),
        _admin("DELETE", "/admin/api/keys/{id}", AdminKeys.revoke, "Revoke a key."),
    ),
    Dashboard: (
        Route("GET", "/admin", Dashboard.redirect, "Redirect to the status page.", is_open=True, response=None),
        Route("GET", "/admin/", Dashboard.page, "Return the status page, for browsers.", response=None),
        Route(
            "GET",
            "/admin/static/style.css",
            Dashboard.style,
            "Return the style of the status page.",
            is_open=True,
            response=None,
        ),
    ),
    Description: (Route("GET", "/openapi.json", Description.get, "Return this description.", is_open=True),),
    Health: (
        Route("GET", "/healthz", Health.live, "Return whether the process runs.", is_open=True),
        Route(
            "GET",
            "/readyz",
            Health.ready,
            "Return whether requests can be served.",
            is_open=True,
            query=("strict",),
        ),
    ),
    MetricsPage: (
        Route("GET", "/metrics", MetricsPage.get, "Return Prometheus metrics.", scope="admin", response=None),
    ),
}
ROUTES = tuple(route for routes in TABLE.values() for route in routes)
PARAMETERS = {(route.method, route.canonical): route.query for route in ROUTES if route.query is not None}


def add_routes(app: web.Application, objects: Mapping[type, Any], auth: Authenticator) -> None:
    """Add the routes of every class in `objects`."""
    rounds = Rounds()
    for kind, routes in TABLE.items():
        if kind in objects:
            for route in routes:
                handler = route.handler.__get__(objects[kind])
                if route.scope is not None:
                    handler = guarded(handler, route.scope, auth, rounds)
                if route.method == "GET":
                    # `add_get` also answers HEAD.
                    app.router.add_get(route.path, handler)
                else:
                    app.router.add_route(route.method, route.path, handler)
