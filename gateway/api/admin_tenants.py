"""`/admin/api/tenants`: who may use the service, and how much."""

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.admission.auth import Authenticator
from gateway.api.bodies import json_response, read_body
from gateway.records.tenants import Limits, OnTokenLimit, Tenant, Tenants

Requests = Annotated[int, Meta(ge=1, le=10_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000_000)]
Concurrent = Annotated[int, Meta(ge=1, le=100_000)]
MicroUnits = Annotated[int, Meta(ge=1, le=10**15)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


class LimitFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """null: not limited. What is left out stays as it is."""

    requests_per_minute: Requests | UnsetType | None = UNSET
    tokens_per_minute: Tokens | UnsetType | None = UNSET
    tokens_per_day: Tokens | UnsetType | None = UNSET
    max_concurrent: Concurrent | UnsetType | None = UNSET
    max_concurrent_tokens: Tokens | UnsetType | None = UNSET
    budget_per_month: MicroUnits | UnsetType | None = UNSET

    def given(self) -> dict[str, Any]:
        """The fields that the body had."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}

    def limits(self) -> Limits:
        """What the body had of Limits; a field that it had not is not limited."""
        return Limits(**{name: value for name, value in self.given().items() if name in Limits.__struct_fields__})


class TenantChanges(LimitFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weight: Annotated[float, Meta(ge=0.01, le=1000)] | UnsetType = UNSET
    priority: Annotated[int, Meta(ge=0, le=9)] | UnsetType = UNSET
    on_token_limit: OnTokenLimit | UnsetType = UNSET
    suspended: bool | UnsetType = UNSET
    model_limits: Annotated[dict[ModelName, LimitFields], Meta(max_length=100)] | UnsetType = UNSET

    def given(self) -> dict[str, Any]:
        given = super().given()
        if self.model_limits is not UNSET:
            given["model_limits"] = {model: fields.limits() for model, fields in self.model_limits.items()}
        return given


class NewTenant(TenantChanges, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class AdminTenants:
    """A change holds here at once, on every other gateway within a second."""

    def __init__(self, *, auth: Authenticator, tenants: Tenants) -> None:
        self._auth = auth
        self._tenants = tenants

    def routes(self) -> list[web.RouteDef]:
        tenant = "/admin/api/tenants/{tenant}"
        return [
            web.post("/admin/api/tenants", self.create),
            web.get("/admin/api/tenants", self.list),
            web.get(tenant, self.get),
            web.patch(tenant, self.update),
            web.delete(tenant, self.delete),
        ]

    async def create(self, request: web.Request) -> web.Response:
        actor = await self._auth.admin(request.headers.get("Authorization"))
        fields = (await read_body(request, NewTenant)).given()
        return json_response(describe_tenant(await self._tenants.create(fields.pop("name"), fields, actor)), status=201)

    async def list(self, request: web.Request) -> web.Response:
        await self._auth.admin(request.headers.get("Authorization"))
        tenants = await self._tenants.list()
        return json_response({"object": "list", "data": [describe_tenant(tenant) for tenant in tenants]})

    async def get(self, request: web.Request) -> web.Response:
        await self._auth.admin(request.headers.get("Authorization"))
        return json_response(describe_tenant(await self._tenants.get(request.match_info["tenant"])))

    async def update(self, request: web.Request) -> web.Response:
        actor = await self._auth.admin(request.headers.get("Authorization"))
        changes = (await read_body(request, TenantChanges)).given()
        tenant = await self._tenants.update(request.match_info["tenant"], changes, actor)
        self._auth.forget()
        return json_response(describe_tenant(tenant))

    async def delete(self, request: web.Request) -> web.Response:
        actor = await self._auth.admin(request.headers.get("Authorization"))
        name = request.match_info["tenant"]
        await self._tenants.delete(name, actor)
        self._auth.forget()
        return json_response({"object": "tenant", "name": name, "deleted": True})


def describe_tenant(tenant: Tenant) -> dict[str, Any]:
    """As the API shows it: the limits beside the other fields; a model's without those that are not set."""
    fields = msgspec.structs.asdict(tenant)
    limits = msgspec.structs.asdict(fields.pop("limits"))
    return {"object": "tenant", "id": tenant.id, "name": tenant.name, **limits, **fields}
