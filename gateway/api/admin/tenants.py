"""`/admin/api/tenants`: tenants and their limits."""

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.access.auth import Authenticator
from gateway.access.scopes import ACTOR
from gateway.api.requests.fields import json_response, read_body, read_raw
from gateway.api.requests.named_models import check_models
from gateway.errors import BadRequest
from gateway.quota.kinds import ADAPTER_KINDS, REQUEST_KINDS, Kind
from gateway.records.catalog import Catalog
from gateway.records.limits import Limits
from gateway.records.tenants import OnTokenLimit, Tenant, Tenants

T = TypeVar("T")
# The path in msgspec's message about a fault within a body's model_limits.
OF_A_MODEL = "model_limits[...]"
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


def _limit_fields(kinds: Iterable[Kind], base: type[Struct]) -> Any:
    """Return a Struct with a field for each kind of limit."""
    fields = [(kind.name, Annotated[int, Meta(ge=1, le=kind.largest)] | UnsetType | None, UNSET) for kind in kinds]
    return msgspec.defstruct("Fields", fields, bases=(base,), frozen=True, kw_only=True, forbid_unknown_fields=True)


_RequestLimits: Any = _limit_fields(REQUEST_KINDS, Struct)


class LimitFields(_RequestLimits, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits in a body. null removes a limit; an absent field leaves its limit unchanged."""

    def given(self) -> dict[str, Any]:
        """Return the fields that the body contains."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}

    def limits(self) -> Limits:
        """Return the body's Limits. An absent field is not limited."""
        return Limits(**{name: value for name, value in self.given().items() if name in Limits.__struct_fields__})


_TenantLimits: Any = _limit_fields(ADAPTER_KINDS, LimitFields)


class TenantChanges(_TenantLimits, LimitFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weight: Annotated[float, Meta(ge=0.01, le=1000)] | UnsetType = UNSET
    priority: Annotated[int, Meta(ge=0, le=9)] | UnsetType = UNSET
    ttft_target: Annotated[float, Meta(gt=0, le=3600)] | UnsetType | None = UNSET
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
    """Routes for tenants. A change takes effect here at once and on every other gateway within a second."""

    def __init__(self, *, auth: Authenticator, tenants: Tenants, catalog: Catalog) -> None:
        self._auth = auth
        self._tenants = tenants
        self._catalog = catalog

    async def create(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        fields = (await _read(request, NewTenant)).given()
        await check_models(
            request, self._catalog, None, fields.get("model_limits", ()), "model_limits", any_adapter=True
        )
        return json_response(describe_tenant(await self._tenants.create(fields.pop("name"), fields, actor)), status=201)

    async def list(self, request: web.Request) -> web.Response:
        tenants = await self._tenants.list()
        return json_response({"object": "list", "data": [describe_tenant(tenant) for tenant in tenants]})

    async def get(self, request: web.Request) -> web.Response:
        return json_response(describe_tenant(await self._tenants.get(request.match_info["tenant"])))

    async def update(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        changes = (await _read(request, TenantChanges)).given()
        name = request.match_info["tenant"]
        if "model_limits" in changes:
            before = await self._tenants.get(name)
            new = changes["model_limits"].keys() - before.model_limits.keys()
            await check_models(request, self._catalog, before, sorted(new), "model_limits", any_adapter=True)
        tenant = await self._tenants.update(name, changes, actor)
        await self._auth.catch_up()
        return json_response(describe_tenant(tenant))

    async def delete(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        name = request.match_info["tenant"]
        await self._tenants.delete(name, actor, self._catalog.base_model)
        await self._auth.catch_up()
        return json_response({"object": "tenant", "name": name, "deleted": True})


async def _read(request: web.Request, kind: type[T]) -> T:
    """Return the body as `read_body` does. An error within model_limits names the model, which msgspec leaves out."""
    try:
        return await read_body(request, kind)
    except BadRequest as error:
        path = error.param or ""
        model = _model_at_fault(await read_raw(request)) if path.startswith(OF_A_MODEL) else None
        if model is None:
            raise
        named = path.replace(OF_A_MODEL, f"model_limits.{model}")
        raise BadRequest(error.message.replace(path, named), param=named) from error


class _ModelLimits(Struct):
    model_limits: dict[str, Any] = {}


def _model_at_fault(body: bytes) -> str | None:
    """Return the first model with malformed limits; None if the body cannot be decoded."""
    try:
        given = msgspec.json.decode(body, type=_ModelLimits)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return next((name for name, limits in given.model_limits.items() if not _are_limits(limits)), None)


def _are_limits(given: object) -> bool:
    try:
        msgspec.convert(given, LimitFields)
    except msgspec.ValidationError:
        return False
    return True


def describe_tenant(tenant: Tenant) -> dict[str, Any]:
    """Return the tenant as the API shows it: limits beside the other fields, models' limits without unlimited ones."""
    fields = msgspec.structs.asdict(tenant)
    limits = msgspec.structs.asdict(fields.pop("limits"))
    of_adapters = msgspec.structs.asdict(fields.pop("adapter_limits"))
    return {"object": "tenant", "id": tenant.id, "name": tenant.name, **limits, **of_adapters, **fields}
