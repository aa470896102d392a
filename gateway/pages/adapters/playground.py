"""`/admin/playground`: one prompt to one or two models of a tenant, streamed.

The page's script sends the requests to `/admin/playground/{tenant}/chat` (gateway/api/admin/tenant_chats.py).
"""

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from gateway.errors import RecordNotFound
from gateway.pages.frame.frame import Frame
from gateway.records.adapters.list import AdapterList, TenantModel
from gateway.records.bases.registry import Bases
from gateway.records.tenants.tenants import Tenant, Tenants

QUERY = ("tenant", "a", "b")
# Kinds of models in the order of the page, and their titles.
KINDS = (("adapter", "adapter"), ("alias", "alias"), ("version", "version"), ("mixture", "saved mixture"))
MAX_MODEL_CHARS = 256


class PlaygroundPages:
    """Page of the playground."""

    def __init__(self, *, frame: Frame, tenants: Tenants, adapters: AdapterList, bases: Bases) -> None:
        self._frame = frame
        self._tenants = tenants
        self._adapters = adapters
        self._bases = bases

    async def show(self, request: web.Request) -> web.Response:
        """Show the form for the tenant of the query, or the choice of a tenant."""
        given, tenant, problem = request.query.get("tenant", "").strip(), None, None
        if given:
            try:
                tenant = await self._tenants.get(given)
            except RecordNotFound as error:
                problem = error.message
        if tenant is not None and tenant.suspended:
            problem = "This tenant is suspended, so its requests are refused."
        return await self._render(request, tenant, problem)

    async def _render(self, request: web.Request, tenant: Tenant | None, problem: str | None) -> web.Response:
        found = [] if tenant is None else await self._adapters.models(tenant.id)
        return self._frame.render(
            request,
            "playground.html",
            title="Playground",
            tenant=tenant,
            problem=problem,
            names=await self._adapters.tenants(),
            chat_url=None if tenant is None else f"/admin/playground/{tenant.name}/chat",
            requests_url="/admin/requests/",
            **model_context(request, [base.name for base in self._bases.listed], found),
        )


def model_context(
    request: web.Request, base_names: Sequence[str], tenant_models: Sequence[TenantModel]
) -> dict[str, Any]:
    """Return the template's variables: the models, and the two that are chosen at first."""
    titles, base = dict(KINDS), next(iter(base_names), "")
    models = [(name, "base model") for name in base_names]
    models += [(each.id, each.means or titles[each.kind]) for each in tenant_models]
    adapters = [each.id for each in tenant_models if each.kind == "adapter"]
    return {
        "models": models,
        "first": request.query.get("a", adapters[0] if adapters else base)[:MAX_MODEL_CHARS],
        "second": request.query.get("b", base if adapters else "")[:MAX_MODEL_CHARS],
    }
