"""`POST /admin/api/tenants/bulk`: one change to all tenants that match a filter, after a preview."""

from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.access.auth import Authenticator
from gateway.api.admin.tenants import Tag
from gateway.api.requests.fields import encoded, json_response, read_body, read_flag
from gateway.api.scopes import ACTOR
from gateway.errors import BadRequest
from gateway.records.cooperative_rows import in_pieces
from gateway.records.tenants.bulk import BulkChange, Planned, TenantBulk
from gateway.records.tenants.list import TenantFilter
from gateway.records.tenants.terms import FIELDS

# Maximum number of tenants in a preview. Its `count` includes the others.
MAX_LISTED = 1000
Text = Annotated[str, Meta(max_length=256)]
Tags = Annotated[tuple[Tag, ...], Meta(max_length=20)]
TermNames = Annotated[tuple[Literal[FIELDS], ...], Meta(max_length=len(FIELDS))]  # type: ignore[valid-type]


class BulkFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter as in the list of tenants. An empty object matches every tenant."""

    plan: Text | None = None
    tag: Text | None = None
    suspended: bool | None = None
    over_budget: Annotated[float, Meta(ge=0)] | None = None
    q: Text | None = None
    idle_days: Annotated[int, Meta(ge=1, le=9999)] | None = None

    def criteria(self) -> TenantFilter:
        return TenantFilter(**{name: getattr(self, name) for name in TenantFilter.__struct_fields__})


class NewBulk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a change of many tenants. expect: the confirmed number of tenants that change."""

    filter: BulkFilter
    plan: Annotated[str, Meta(max_length=64)] | UnsetType | None = UNSET
    suspended: bool | UnsetType = UNSET
    inherit: TermNames = ()
    add_tags: Tags = ()
    remove_tags: Tags = ()
    expect: Annotated[int, Meta(ge=0)] | None = None

    def change(self) -> BulkChange:
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("plan", "suspended")}
        fields = {name: value for name, value in fields.items() if value is not UNSET}
        return BulkChange(fields=fields, inherit=self.inherit, add_tags=self.add_tags, remove_tags=self.remove_tags)


class BulkPreview(Struct, frozen=True, kw_only=True):
    """Tenants that would change, at most 1,000 of them. count: number of all."""

    object: Literal["bulk"] = "bulk"
    dry_run: Literal[True] = True
    count: int
    data: list[Planned]


class BulkResult(Struct, frozen=True, kw_only=True):
    """Names of the changed tenants, and their number."""

    object: Literal["bulk"] = "bulk"
    dry_run: Literal[False] = False
    count: int
    tenants: list[str]


class AdminTenantBulk:
    """Route for changes of many tenants."""

    def __init__(self, *, auth: Authenticator, bulk: TenantBulk) -> None:
        self._auth = auth
        self._bulk = bulk

    async def change(self, request: web.Request) -> web.Response:
        """Change the tenants that match; with `?dry_run=true` only list them with their old and new values."""
        given = await read_body(request, NewBulk)
        criteria, change = given.filter.criteria(), given.change()
        if change == BulkChange():
            raise BadRequest("The body has no change: expected plan, suspended, inherit, add_tags or remove_tags.")
        if read_flag(request, "dry_run"):
            planned = await self._bulk.plan(criteria, change)
            listed = await in_pieces(planned[:MAX_LISTED], encoded)
            return json_response(BulkPreview(count=len(planned), data=listed))
        if given.expect is None:
            raise BadRequest("expect: is required, the `count` of the same request with ?dry_run=true.", param="expect")
        changed = await self._bulk.apply(criteria, change, given.expect, request[ACTOR])
        await self._auth.catch_up()
        return json_response(BulkResult(count=len(changed), tenants=changed))
