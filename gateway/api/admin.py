"""`/admin/api/...`: tenants, keys, adapters on a tenant's behalf, usage and engines. Admin keys only."""

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.admission.auth import ADMIN_SCOPE, TENANT_SCOPES, Authenticator
from gateway.api.adapters import AdapterIntake, usage_body
from gateway.api.bodies import json_response, read_body, read_moment
from gateway.errors import BadRequest, RecordNotFound
from gateway.fleet.registry import EngineRecord, Registry
from gateway.records.catalog import Catalog
from gateway.records.ledger import UsageReport
from gateway.records.tenants import TENANT_NAME, ApiKey, Limits, Tenant, Tenants

DEFAULTS = Limits()

Requests = Annotated[int, Meta(ge=1, le=10_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000_000)]
Concurrent = Annotated[int, Meta(ge=1, le=100_000)]
Weight = Annotated[float, Meta(ge=0.01, le=1000)]


class NewTenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    requests_per_minute: Requests = DEFAULTS.requests_per_minute
    tokens_per_minute: Tokens = DEFAULTS.tokens_per_minute
    max_concurrent: Concurrent = DEFAULTS.max_concurrent
    weight: Weight = DEFAULTS.weight


class TenantChanges(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    requests_per_minute: Requests | UnsetType = UNSET
    tokens_per_minute: Tokens | UnsetType = UNSET
    max_concurrent: Concurrent | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET


class NewKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """scopes: of a tenant's key; all of them if not given."""

    label: Annotated[str, Meta(max_length=100)] = ""
    scopes: tuple[str, ...] = tuple(sorted(TENANT_SCOPES))


class NewAdminKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    label: Annotated[str, Meta(max_length=100)] = ""


class Admin:
    """The operator's routes."""

    def __init__(
        self,
        *,
        auth: Authenticator,
        tenants: Tenants,
        catalog: Catalog,
        intake: AdapterIntake,
        report: UsageReport,
        registry: Registry,
    ) -> None:
        self._auth = auth
        self._tenants = tenants
        self._catalog = catalog
        self._intake = intake
        self._report = report
        self._registry = registry

    def routes(self) -> list[web.RouteDef]:
        tenant = "/admin/api/tenants/{tenant}"
        return [
            web.post("/admin/api/tenants", self.create_tenant),
            web.get("/admin/api/tenants", self.list_tenants),
            web.get(tenant, self.get_tenant),
            web.patch(tenant, self.update_tenant),
            web.delete(tenant, self.delete_tenant),
            web.post(f"{tenant}/keys", self.create_key),
            web.get(f"{tenant}/keys", self.list_keys),
            web.post("/admin/api/keys", self.create_admin_key),
            web.delete("/admin/api/keys/{id}", self.revoke_key),
            web.post(f"{tenant}/adapters", self.push_adapter),
            web.get(f"{tenant}/adapters", self.list_adapters),
            web.delete(f"{tenant}/adapters/{{name}}", self.delete_adapter),
            web.get("/admin/api/usage", self.usage),
            web.get("/admin/api/engines", self.engines),
        ]

    async def create_tenant(self, request: web.Request) -> web.Response:
        actor = await self._actor(request)
        given = await read_body(request, NewTenant)
        limits = Limits(**{name: getattr(given, name) for name in Limits.__struct_fields__})
        return json_response(describe_tenant(await self._tenants.create(given.name, limits, actor)), status=201)

    async def list_tenants(self, request: web.Request) -> web.Response:
        await self._actor(request)
        tenants = await self._tenants.list()
        return json_response({"object": "list", "data": [describe_tenant(tenant) for tenant in tenants]})

    async def get_tenant(self, request: web.Request) -> web.Response:
        await self._actor(request)
        return json_response(describe_tenant(await self._tenant(request)))

    async def update_tenant(self, request: web.Request) -> web.Response:
        actor = await self._actor(request)
        given = await read_body(request, TenantChanges)
        changes = {k: v for k, v in msgspec.structs.asdict(given).items() if v is not UNSET}
        return json_response(describe_tenant(await self._tenants.update(request.match_info["tenant"], changes, actor)))

    async def delete_tenant(self, request: web.Request) -> web.Response:
        actor = await self._actor(request)
        name = request.match_info["tenant"]
        await self._tenants.delete(name, actor)
        return json_response({"object": "tenant", "name": name, "deleted": True})

    async def create_key(self, request: web.Request) -> web.Response:
        actor = await self._actor(request)
        given = await read_body(request, NewKey)
        unknown = sorted(set(given.scopes) - TENANT_SCOPES)
        if unknown or not given.scopes:
            raise BadRequest(f"Expected some of the scopes {', '.join(sorted(TENANT_SCOPES))}.", param="scopes")
        key, clear = self._auth.issue(await self._tenant(request), frozenset(given.scopes), given.label)
        await self._tenants.add_key(key, actor)
        return json_response({**describe_key(key), "key": clear}, status=201)

    async def create_admin_key(self, request: web.Request) -> web.Response:
        actor = await self._actor(request)
        given = await read_body(request, NewAdminKey)
        key, clear = self._auth.issue(None, frozenset({ADMIN_SCOPE}), given.label)
        await self._tenants.add_key(key, actor)
        return json_response({**describe_key(key), "key": clear}, status=201)

    async def list_keys(self, request: web.Request) -> web.Response:
        await self._actor(request)
        keys = await self._tenants.list_keys(await self._tenant(request))
        return json_response({"object": "list", "data": [describe_key(key) for key in keys]})

    async def revoke_key(self, request: web.Request) -> web.Response:
        actor = await self._actor(request)
        key_id = request.match_info["id"]
        await self._tenants.revoke_key(key_id, actor)
        self._auth.forget(key_id)
        return json_response({"object": "api_key", "id": key_id, "revoked": True})

    async def push_adapter(self, request: web.Request) -> web.Response:
        actor = await self._actor(request)
        return await self._intake.push(request, await self._tenant(request), actor)

    async def list_adapters(self, request: web.Request) -> web.Response:
        await self._actor(request)
        return await self._intake.list(await self._tenant(request))

    async def delete_adapter(self, request: web.Request) -> web.Response:
        actor = await self._actor(request)
        name = request.match_info["name"]
        await self._catalog.delete(await self._tenant(request), name, actor)
        return json_response({"object": "adapter", "name": name, "deleted": True})

    async def usage(self, request: web.Request) -> web.Response:
        """Of one tenant (`?tenant=`, deleted ones too), or of all."""
        await self._actor(request)
        name = request.query.get("tenant")
        since, until = read_moment(request, "since"), read_moment(request, "until")
        if name is not None:
            try:
                await self._tenants.get(name)
            except RecordNotFound:
                if not (TENANT_NAME.fullmatch(name) and await self._report.knows(name)):
                    raise
        return json_response(usage_body(await self._report.by_model(since=since, until=until, tenant=name)))

    async def engines(self, request: web.Request) -> web.Response:
        await self._actor(request)
        return json_response({"object": "list", "data": [describe_engine(e) for e in self._registry.engines]})

    async def _actor(self, request: web.Request) -> str:
        return await self._auth.admin(request.headers.get("Authorization"))

    async def _tenant(self, request: web.Request) -> Tenant:
        return await self._tenants.get(request.match_info["tenant"])


def describe_tenant(tenant: Tenant) -> dict[str, Any]:
    limits = msgspec.structs.asdict(tenant.limits)
    return {"object": "tenant", "id": tenant.id, "name": tenant.name, **limits, "created_at": tenant.created_at}


def describe_key(key: ApiKey) -> dict[str, Any]:
    return {
        "object": "api_key",
        "id": key.id,
        "tenant": key.tenant.name if key.tenant else None,
        "label": key.label,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def describe_engine(engine: EngineRecord) -> dict[str, Any]:
    return {
        "object": "engine",
        "url": engine.url,
        "healthy": engine.healthy,
        "problem": engine.problem,
        "in_flight": engine.in_flight,
        "resident": sorted(engine.resident),
        "state": engine.state,
    }
