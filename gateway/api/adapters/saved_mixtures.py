"""Routes of saved mixtures, for a tenant itself and for operators under `/admin/api/tenants`."""

from datetime import datetime
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from gateway.api.adapters.caller import find_caller, read_small
from gateway.api.requests.fields import json_response
from gateway.quota.quota import Quota
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.saved_mixtures import MAX_CHARS, SavedMixture
from gateway.records.tenants.tenants import Tenants


class NewMixture(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixture that is saved. model: its text, such as `a*0.7+b:prod*0.3`."""

    model: Annotated[str, Meta(max_length=MAX_CHARS)]


class ShownMixture(Struct, frozen=True, kw_only=True):
    """A saved mixture. model: its text. etag: for `If-Match`."""

    object: Literal["mixture"] = "mixture"
    name: str
    model: str
    created_at: datetime
    etag: str


class MixtureList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ShownMixture]


class DeletedMixture(Struct, frozen=True, kw_only=True):
    object: Literal["mixture"] = "mixture"
    name: str
    deleted: bool = True


class SavedMixtureRoutes:
    """Routes of saved mixtures. A key needs permission for the name, and to save it also for each part."""

    def __init__(self, *, tenants: Tenants, catalog: Catalog, quota: Quota) -> None:
        self._tenants = tenants
        self._catalog = catalog
        self._quota = quota

    async def list(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        found = await self._catalog.mixtures.list(caller.tenant)
        if caller.principal is not None:
            found = [each for each in found if caller.principal.may_use(each.name)]
        return json_response(MixtureList(data=[_describe(each) for each in found]))

    async def get(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        return _mixture_response(await self._catalog.mixtures.get(caller.tenant, request.match_info["name"]))

    async def save(self, request: web.Request) -> web.Response:
        """Save a mixture. An existing one needs its ETag in If-Match."""
        caller = await find_caller(request, self._tenants)
        given = await read_small(request, caller, NewMixture)
        name, if_match = request.match_info["name"], request.headers.get("If-Match")
        self._catalog.check_name(name)
        for part in self._catalog.mixtures.parse(given.model):
            caller.check_name(part.name)
        await caller.count_change(request, self._quota)
        saved, is_new = await self._catalog.mixtures.save(caller.tenant, name, given.model, caller.actor, if_match)
        return _mixture_response(saved, 201 if is_new else 200)

    async def delete(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        await caller.count_change(request, self._quota)
        name, if_match = request.match_info["name"], request.headers.get("If-Match")
        await self._catalog.mixtures.delete(caller.tenant, name, caller.actor, if_match)
        return json_response(DeletedMixture(name=name))


def _describe(saved: SavedMixture) -> ShownMixture:
    return ShownMixture(name=saved.name, model=saved.model, created_at=saved.created_at, etag=saved.etag)


def _mixture_response(saved: SavedMixture, status: int = 200) -> web.Response:
    response = json_response(_describe(saved), status)
    response.headers["ETag"] = saved.etag
    return response
