"""Routes of adapters, part of the table of routes: uploads, versions, aliases, mixtures, probes, golden answers, use.

Most of them exist twice: for a tenant itself under `/v1`, and for operators under `/admin/api/tenants/{tenant}`.
"""

from collections.abc import Mapping
from functools import partial

from gateway.api.adapters.handlers import Adapters, TenantAdapter, TenantAdapterList
from gateway.api.adapters.probes import NewProbe, ProbeRoutes, RecordedProbe
from gateway.api.adapters.saved_mixtures import SavedMixtureRoutes
from gateway.api.adapters.use import AdapterUseAnswer, AdapterUseRoutes, Prefetched
from gateway.api.adapters.versions import AdapterVersions
from gateway.api.admin.adapters import LIST_QUERY, AdapterPage, AdminAdapters
from gateway.api.admin.tenant_chats import NamedModelList, TenantChats
from gateway.api.golden.handlers import GoldenRoutes
from gateway.api.route import ADDED, Route, Upload
from gateway.api.route_groups import golden_routes, mixture_routes, upload_routes, version_routes
from gateway.api.uploads.importing import Imports
from gateway.api.uploads.resumable import ResumableUploads
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.responses import ChatCompletion, Completion

TENANT = "/admin/api/tenants/{tenant}"

_admin = partial(Route, scope="admin", query=())
# Chat of a playground, by a browser's session.
_page_chat = partial(Route, "POST", scope="page", request=ChatCompletionRequest, response=ChatCompletion, streams=True)


ADAPTER_ROUTES: Mapping[type, tuple[Route, ...]] = {
    Adapters: (
        Route(
            "POST",
            "/v1/adapters",
            Adapters.push,
            "Upload an adapter, or its next version.",
            scope="adapters",
            request=Upload,
            response=TenantAdapter,
            statuses=ADDED,
        ),
        Route(
            "GET",
            "/v1/adapters",
            Adapters.list,
            "List the tenant's adapters.",
            scope="adapters",
            response=TenantAdapterList,
        ),
        Route(
            "GET", "/v1/adapters/{name}", Adapters.get, "Return an adapter.", scope="adapters", response=TenantAdapter
        ),
    ),
    AdapterVersions: version_routes("/v1/adapters", partial(Route, scope="adapters"))
    + version_routes(f"{TENANT}/adapters", partial(Route, scope="admin")),
    SavedMixtureRoutes: mixture_routes("/v1/mixtures", partial(Route, scope="adapters"))
    + mixture_routes(f"{TENANT}/mixtures", partial(Route, scope="admin")),
    ResumableUploads: upload_routes("/v1/adapter-uploads", partial(Route, scope="adapters"))
    + upload_routes(f"{TENANT}/adapter-uploads", partial(Route, scope="admin")),
    Imports: (
        Route(
            "POST",
            "/v1/adapter-imports",
            Imports.add,
            "Import an adapter from an allowed place.",
            scope="adapters",
            query=("name", "source", "base"),
            response=TenantAdapter,
            statuses=ADDED,
        ),
        _admin(
            "POST",
            f"{TENANT}/adapter-imports",
            Imports.add,
            "Import an adapter for a tenant.",
            query=("name", "source", "base"),
            response=TenantAdapter,
            statuses=ADDED,
        ),
    ),
    ProbeRoutes: (
        Route(
            "GET",
            "/v1/adapters/{name}/versions/{version}/probe",
            ProbeRoutes.get,
            "Return the probe of a version.",
            scope="adapters",
            response=RecordedProbe,
        ),
        _admin(
            "GET",
            f"{TENANT}/adapters/{{name}}/versions/{{version}}/probe",
            ProbeRoutes.get,
            "Return the probe of a version.",
            response=RecordedProbe,
        ),
        Route(
            "POST",
            "/v1/adapters/{name}/versions/{version}/probe",
            ProbeRoutes.verify,
            "Probe a version again.",
            scope="adapters",
            response=NewProbe,
        ),
        _admin(
            "POST",
            f"{TENANT}/adapters/{{name}}/versions/{{version}}/probe",
            ProbeRoutes.verify,
            "Probe a tenant's version again.",
            query=("engine",),
            response=NewProbe,
        ),
    ),
    GoldenRoutes: golden_routes("/v1/adapters", partial(Route, scope="adapters"), ())
    + golden_routes(f"{TENANT}/adapters", partial(Route, scope="admin"), ("engine",)),
    AdapterUseRoutes: (
        Route(
            "GET",
            "/v1/adapters/{name}/use",
            AdapterUseRoutes.use,
            "Return who uses an adapter, and its changes.",
            scope="adapters",
            response=AdapterUseAnswer,
        ),
        _admin(
            "GET",
            f"{TENANT}/adapters/{{name}}/use",
            AdapterUseRoutes.use,
            "Return who uses a tenant's adapter, and its changes.",
            response=AdapterUseAnswer,
        ),
        _admin(
            "POST",
            f"{TENANT}/adapters/{{name}}/versions/{{version}}/prefetch",
            AdapterUseRoutes.prefetch,
            "Load a version into an engine's host memory.",
            query=("engine",),
            response=Prefetched,
        ),
    ),
    TenantChats: (
        _admin(
            "GET",
            f"{TENANT}/models",
            TenantChats.models,
            "List the models of a tenant's requests.",
            response=NamedModelList,
        ),
        _page_chat("/console/playground/chat", TenantChats.own_chat, "Answer a chat of the console's playground."),
        _page_chat("/admin/playground/{tenant}/chat", TenantChats.chat, "Answer a chat of the playground."),
        Route(
            "POST",
            f"{TENANT}/chat/completions",
            TenantChats.chat,
            "Answer a chat for a tenant, which pays for it.",
            scope="admin",
            request=ChatCompletionRequest,
            response=ChatCompletion,
            streams=True,
        ),
        Route(
            "POST",
            f"{TENANT}/completions",
            TenantChats.completions,
            "Continue a text for a tenant, which pays for it.",
            scope="admin",
            request=CompletionRequest,
            response=Completion,
            streams=True,
        ),
    ),
    AdminAdapters: (
        _admin(
            "GET",
            "/admin/api/adapters",
            AdminAdapters.list,
            "List the adapters of all tenants.",
            query=LIST_QUERY,
            response=AdapterPage,
        ),
    ),
}
