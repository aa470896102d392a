"""`/admin/api/tenants`: tenants and their limits."""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.access.auth import Authenticator
from gateway.access.roles import check_role
from gateway.api.admin.shown_terms import with_terms
from gateway.api.requests.fields import encoded, json_response, parse_text, read_body, read_limit, read_raw
from gateway.api.requests.named_models import check_models
from gateway.api.scopes import ACTOR, ROLE
from gateway.errors import BadRequest
from gateway.limits.kinds import ADAPTER_KINDS, ALERT_KINDS, BUDGET_NAMES, REQUEST_KINDS, Kind
from gateway.quota.limits import NO_LIMITS
from gateway.records.adapters.catalog import Catalog
from gateway.records.cooperative_rows import in_pieces
from gateway.records.money.plans import Plans
from gateway.records.tenants.limits import Limits
from gateway.records.tenants.list import SORTS, Sort, TenantFilter, TenantLists, TenantMonth
from gateway.records.tenants.tenants import Tenant, Tenants
from gateway.records.tenants.terms import FIELDS, NO_TERMS, OnTokenLimit, Source, Terms, own_terms, sources

T = TypeVar("T")
MAX_TENANTS = 1000
# The path in msgspec's message about a fault within a body's model_limits.
OF_A_MODEL = "model_limits[...]"
BudgetShare = Annotated[float, Meta(ge=0.01, le=1)]
# Terms about money, which the role billing may change.
BUDGETS = frozenset((*BUDGET_NAMES, "budget_warn_at"))
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
# Tags are joined by commas in the database and on the command line.
Tag = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,31}$")]


def _limit_fields(kinds: Iterable[Kind], base: type[Struct]) -> Any:
    """Return a Struct with a field for each kind of limit."""
    fields = [(kind.name, Annotated[int, _bounds(kind)] | UnsetType | None, UNSET) for kind in kinds]
    return msgspec.defstruct("Fields", fields, bases=(base,), frozen=True, kw_only=True, forbid_unknown_fields=True)


def _bounds(kind: Kind) -> Meta:
    # A budget of 0 allows only requests that cost nothing.
    return Meta(ge=0 if kind.takes == "cost" else 1, le=kind.largest)


_RequestLimits: Any = _limit_fields(REQUEST_KINDS, Struct)


class LimitFields(_RequestLimits, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits in a body. null removes a limit; an absent field leaves its limit unchanged."""

    def given(self) -> dict[str, Any]:
        """Return the fields that the body contains."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}

    def limits(self, absent: Limits = NO_LIMITS) -> Limits:
        """Return the body's Limits. absent: the limits for absent fields."""
        given = {name: value for name, value in self.given().items() if name in Limits.__struct_fields__}
        return msgspec.structs.replace(absent, **given)


_TenantLimits: Any = _limit_fields((*ADAPTER_KINDS, *ALERT_KINDS), LimitFields)


class TermFields(_TenantLimits, LimitFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Terms of a tenant or a plan in a body. null means no limit, or no target."""

    weight: Annotated[float, Meta(ge=0.01, le=1000)] | UnsetType = UNSET
    priority: Annotated[int, Meta(ge=0, le=9)] | UnsetType = UNSET
    ttft_target: Annotated[float, Meta(gt=0, le=3600)] | UnsetType | None = UNSET
    on_token_limit: OnTokenLimit | UnsetType = UNSET
    model_limits: Annotated[dict[ModelName, LimitFields], Meta(max_length=100)] | UnsetType = UNSET
    budget_warn_at: Annotated[tuple[BudgetShare, ...], Meta(max_length=10)] | UnsetType = UNSET

    def given(self) -> dict[str, Any]:
        given = super().given()
        if self.model_limits is not UNSET:
            given["model_limits"] = {model: fields.limits() for model, fields in self.model_limits.items()}
        if self.budget_warn_at is not UNSET:
            given["budget_warn_at"] = tuple(sorted(set(self.budget_warn_at)))
        return given


def _text(most: int) -> Any:
    return Annotated[str, Meta(max_length=most)] | UnsetType | None


class TenantChanges(TermFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for changes. inherit: the tenant's own terms to remove; its plan's or the default then applies.

    An absent field stays as it is; a text of null or "" is removed.
    """

    suspended: bool | UnsetType = UNSET
    plan: Annotated[str, Meta(max_length=64)] | UnsetType | None = UNSET
    inherit: Annotated[tuple[Literal[FIELDS], ...], Meta(max_length=len(FIELDS))] | UnsetType = UNSET  # type: ignore[valid-type]
    display_name: _text(100) = UNSET  # type: ignore[valid-type]
    external_id: _text(128) = UNSET  # type: ignore[valid-type]
    contact: _text(200) = UNSET  # type: ignore[valid-type]
    note: _text(1000) = UNSET  # type: ignore[valid-type]
    tags: Annotated[tuple[Tag, ...], Meta(max_length=20)] | UnsetType = UNSET

    def given(self) -> dict[str, Any]:
        given = super().given()
        if both := set(given.get("inherit", ())) & given.keys():
            raise BadRequest(f"inherit: '{min(both)}' is also given a value.", param="inherit")
        return given


class NewTenant(TenantChanges, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTenant(Struct, frozen=True, kw_only=True):
    """Names of a tenant."""

    object: Literal["tenant"] = "tenant"
    id: str
    name: str
    display_name: str | None
    plan: str | None


_WithTerms: Any = with_terms(NamedTenant)


class ShownTenant(_WithTerms, NamedTenant, frozen=True, kw_only=True):
    """A tenant with its effective terms. sources: where each term comes from. external_id: in another system."""

    sources: dict[str, Source]
    suspended: bool
    external_id: str | None
    contact: str | None
    note: str | None
    tags: tuple[str, ...]
    created_at: datetime


class ListedTenant(ShownTenant, frozen=True, kw_only=True):
    """A tenant with its usage of the calendar month (UTC) and the forecast."""

    month: TenantMonth


class TenantList(Struct, frozen=True, kw_only=True):
    """Page of tenants. total: their number on all pages. next: `after` of the next page; null on the last one."""

    object: Literal["list"] = "list"
    data: list[ListedTenant]
    total: int
    next: str | None


class DeletedTenant(Struct, frozen=True, kw_only=True):
    object: Literal["tenant"] = "tenant"
    name: str
    deleted: bool = True


class AdminTenants:
    """Routes for tenants. A change takes effect here at once and on every other gateway within a second."""

    def __init__(
        self, *, auth: Authenticator, tenants: Tenants, lists: TenantLists, plans: Plans, catalog: Catalog
    ) -> None:
        self._auth = auth
        self._tenants = tenants
        self._lists = lists
        self._plans = plans
        self._catalog = catalog

    async def create(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        fields = (await read_terms_body(request, NewTenant)).given()
        await check_models(
            request, self._catalog, None, fields.get("model_limits", ()), "model_limits", any_adapter=True
        )
        tenant = await self._tenants.create(fields.pop("name"), fields, actor)
        return json_response(describe_tenant(tenant, await self._plans.terms()), status=201)

    async def list(self, request: web.Request) -> web.Response:
        """List the tenants that match, with their usage of the month and its forecast."""
        sort, order = request.query.get("sort", "name"), request.query.get("order")
        if sort not in SORTS:
            raise BadRequest(f"sort: expected one of {', '.join(SORTS)}.", param="sort")
        if order not in (None, "asc", "desc"):
            raise BadRequest("order: expected asc or desc.", param="order")
        page = await self._lists.page(
            read_filter(request.query),
            sort=cast(Sort, sort),
            descending=order == "desc" if order else sort != "name",
            limit=read_limit(request, MAX_TENANTS, MAX_TENANTS),
            after=request.query.get("after"),
        )
        plans = await self._plans.terms()
        data = await in_pieces(page.rows, lambda row: encoded(_with_month(row[0], plans, row[1])))
        return json_response(TenantList(data=data, total=page.total, next=page.next))

    async def get(self, request: web.Request) -> web.Response:
        tenant = await self._tenants.get(request.match_info["tenant"])
        months = await self._lists.months([tenant])
        return json_response(_with_month(tenant, await self._plans.terms(), months[tenant.id]))

    async def update(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        changes = (await read_terms_body(request, TenantChanges)).given()
        if changes.keys() - BUDGETS:
            # The role billing may change budgets only.
            check_role(request[ROLE], "operator")
        name = request.match_info["tenant"]
        if "model_limits" in changes:
            before = await self._tenants.get(name)
            new = changes["model_limits"].keys() - before.model_limits.keys()
            await check_models(request, self._catalog, before, sorted(new), "model_limits", any_adapter=True)
        tenant = await self._tenants.update(name, changes, actor)
        await self._auth.catch_up()
        return json_response(describe_tenant(tenant, await self._plans.terms()))

    async def delete(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        name = request.match_info["tenant"]
        await self._tenants.delete(name, actor, self._catalog.bases.names)
        await self._auth.catch_up()
        return json_response(DeletedTenant(name=name))


def read_filter(query: Mapping[str, str]) -> TenantFilter:
    """Return the filter of a query. An empty value counts as absent, except that of `plan`. Raises BadRequest."""
    given: dict[str, Any] = {name: parse_text(query, name) for name in ("tag", "q")}
    if "plan" in query:
        given["plan"] = parse_text(query, "plan") or ""
    if suspended := query.get("suspended"):
        if suspended not in ("true", "false"):
            raise BadRequest("suspended: expected true or false.", param="suspended")
        given["suspended"] = suspended == "true"
    if ratio := query.get("over_budget"):
        if not re.fullmatch(r"\d{1,4}(\.\d{1,6})?", ratio):
            raise BadRequest("over_budget: expected a part of the budget, such as 0.8.", param="over_budget")
        given["over_budget"] = float(ratio)
    if days := query.get("idle_days"):
        if not re.fullmatch(r"[1-9]\d{0,3}", days):
            raise BadRequest("idle_days: expected a number of days from 1 to 9999.", param="idle_days")
        given["idle_days"] = int(days)
    return TenantFilter(**given)


async def read_terms_body(request: web.Request, kind: type[T]) -> T:
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


def _are_limits(value: object) -> bool:
    try:
        msgspec.convert(value, LimitFields)
    except msgspec.ValidationError:
        return False
    return True


def describe_tenant(tenant: Tenant, plans: Mapping[str, Terms]) -> ShownTenant:
    """Return the tenant as the API shows it. plans: the terms of all plans, by name."""
    return ShownTenant(**_fields(tenant, plans))


def _with_month(tenant: Tenant, plans: Mapping[str, Terms], month: TenantMonth) -> ListedTenant:
    return ListedTenant(**_fields(tenant, plans), month=month)


def _fields(tenant: Tenant, plans: Mapping[str, Terms]) -> dict[str, Any]:
    of_plan, terms = plans.get(tenant.plan or "", NO_TERMS), tenant.terms()
    names = ("id", "name", "display_name", "plan", "suspended", "external_id", "contact", "note", "tags", "created_at")
    own = {name: getattr(tenant, name) for name in names}
    return {**own, **terms, "sources": sources(of_plan, own_terms(tenant.own, of_plan, terms))}
