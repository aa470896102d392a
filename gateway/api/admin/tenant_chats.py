"""Requests of an operator to a tenant's models. The tenant's limits, fair share and ledger apply.

The usage row's key id is OPERATOR_KEY followed by the operator's key id, or by PERSON, and the audit log gets an entry.
Neither contains the prompt.
"""

from typing import Literal

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from gateway.access.auth import BOOTSTRAP_KEY_ID, TenantPrincipal
from gateway.api.inference.completions import Completions
from gateway.api.requests.fields import json_response
from gateway.api.scopes import ACTOR, PRINCIPAL, watched_by
from gateway.caller import OPERATOR_KEY, note_key
from gateway.errors import Forbidden
from gateway.records.adapters.list import AdapterList
from gateway.records.audit import Audit
from gateway.records.bases.registry import Bases
from gateway.records.keys.keys import KEY_ID
from gateway.records.keys.watched import TENANT_ITSELF
from gateway.records.tenants.tenants import Tenant, Tenants
from wire.error_codes import TENANT_SUSPENDED

# Stands for a person who logged in without a key. The audit names the person, whom the tenant need not know.
PERSON = "oidc"


class NamedModel(Struct, frozen=True, kw_only=True):
    """A value of `model`. means: the text of a saved mixture; absent for a base model, null for the others."""

    id: str
    kind: Literal["base", "adapter", "alias", "version", "mixture"]
    means: str | UnsetType | None = UNSET


class NamedModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[NamedModel]


class TenantChats:
    """Operator's routes for chats and completions of a tenant's models."""

    def __init__(
        self,
        *,
        tenants: Tenants,
        adapters: AdapterList,
        bases: Bases,
        completions: Completions,
        audit: Audit,
    ) -> None:
        self._tenants = tenants
        self._adapters = adapters
        self._bases = bases
        self._completions = completions
        self._audit = audit

    async def models(self, request: web.Request) -> web.Response:
        """List the values of `model` in a request to a tenant's models, except mixtures that are written as a sum."""
        tenant = await self._tenants.get(request.match_info["tenant"])
        found = await self._adapters.models(tenant.id)
        bases = [NamedModel(id=base.name, kind="base") for base in self._bases.listed]
        others = [NamedModel(id=each.id, kind=each.kind, means=each.means) for each in found]
        return json_response(NamedModelList(data=[*bases, *others]))

    async def own_chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat of the console's playground, for the visitor's tenant."""
        principal = request[PRINCIPAL]
        if "inference" not in principal.scopes:
            raise Forbidden("This needs the scope 'inference', which your session does not have.")
        return await self._completions.chat(request)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat for a tenant, which pays for it."""
        await self._become(request)
        return await self._completions.chat(request)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue a text for a tenant, which pays for it."""
        await self._become(request)
        return await self._completions.completions(request)

    async def _become(self, request: web.Request) -> None:
        """Give the request the tenant's principal. Raises RecordNotFound, Forbidden for a suspended tenant."""
        tenant = await self._tenants.get(request.match_info["tenant"])
        if tenant.suspended:
            raise Forbidden("This tenant is suspended; resume it first.", code=TENANT_SUSPENDED)
        principal = request[PRINCIPAL] = operators_principal(tenant, request[ACTOR], watched_by(request))
        await self._audit.add(request[ACTOR], "playground.request", tenant.name, {}, tenant=tenant.name)
        note_key(principal.key_id, tenant.name, tenant.id)


def operators_principal(tenant: Tenant, actor: str, watched: tuple[str, ...]) -> TenantPrincipal:
    """Return the principal of an operator who acts for a tenant. Only the tenant's limits apply to it.

    watched: the operator's key and session, which must stay valid like the tenant.
    """
    shown = actor if KEY_ID.fullmatch(actor) or actor == BOOTSTRAP_KEY_ID else PERSON
    every = (f"{TENANT_ITSELF}{tenant.id}", *watched)
    return TenantPrincipal(key_id=f"{OPERATOR_KEY}{shown}", tenant=tenant, watched=every)
