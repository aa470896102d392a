"""`/admin/api/keys` and `/v1/keys`: create, list, rotate and revoke API keys. Only the response that creates a key
contains it.
"""

import msgspec
from aiohttp import web

from gateway.api.adapters.caller import AdapterCaller, find_caller, read_small
from gateway.api.key_manager import (
    KeyChanges,
    KeyList,
    KeyManager,
    NewAdminKey,
    NewKey,
    RevokedKey,
    Rotation,
    describe_key,
)
from gateway.api.requests.fields import json_response, read_body, read_flag, read_limit, read_number, read_sort
from gateway.api.requests.key_filter import read_key_filter
from gateway.api.scopes import ACTOR
from gateway.quota.quota import Quota
from gateway.records.cooperative_rows import in_pieces
from gateway.records.keys.keys import ApiKey
from gateway.records.keys.list import MAX_PAGE, SORTS, KeyLists
from gateway.records.tenants.tenants import Tenants

LIST_QUERY = ("tenant", "all", "state", "q", "sort", "limit", "page")
DEFAULT_ROWS = 100


class KeyRoutes:
    """Routes for keys. Changes by a tenant count against its limit of changes, which changes of adapters share."""

    def __init__(self, *, manager: KeyManager, tenants: Tenants, quota: Quota, lists: KeyLists) -> None:
        self._manager = manager
        self._tenants = tenants
        self._quota = quota
        self._lists = lists

    async def create(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        given = await read_small(request, caller, NewKey)
        await caller.count_change(request, self._quota)
        return _shown_once(
            *await self._manager.create(
                caller.tenant, given, caller.actor, caller.principal, force=read_flag(request, "force")
            )
        )

    async def create_admin(self, request: web.Request) -> web.Response:
        return _shown_once(*await self._manager.create_admin(await read_body(request, NewAdminKey), request[ACTOR]))

    async def list(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        keys = await self._manager.list(caller.tenant)
        return json_response(KeyList(data=await in_pieces(keys, describe_key)))

    async def list_admin(self, request: web.Request) -> web.Response:
        """List the admin keys, those of `?tenant=`, or with `?all=true` all keys."""
        if not request.query:
            return json_response(KeyList(data=[describe_key(key) for key in await self._manager.list(None)]))
        criteria, (sort, descending) = read_key_filter(request), read_sort(request, SORTS, "created_at")
        if criteria.tenant is None and not read_flag(request, "all"):
            criteria = msgspec.structs.replace(criteria, tenant="")
        limit, number = read_limit(request, DEFAULT_ROWS, MAX_PAGE), read_number(request, "page", 1, 1_000_000) or 1
        keys, total = await self._lists.page(
            criteria, sort=sort, descending=descending, limit=limit, offset=(number - 1) * limit
        )
        data = await in_pieces(keys, describe_key)
        return json_response(KeyList(data=data, total=total, has_more=number * limit < total))

    async def rotate(self, request: web.Request) -> web.Response:
        """Rotate a tenant's own key."""
        caller = await find_caller(request, self._tenants)
        grace = (await read_small(request, caller, Rotation)).grace_seconds
        await caller.count_change(request, self._quota)
        key_id = request.match_info["id"]
        return _shown_once(*await self._manager.rotate(key_id, grace, caller.actor, caller.principal))

    async def rotate_any(self, request: web.Request) -> web.Response:
        grace = (await read_body(request, Rotation)).grace_seconds
        return _shown_once(*await self._manager.rotate(request.match_info["id"], grace, request[ACTOR]))

    async def change(self, request: web.Request) -> web.Response:
        """Change a tenant's own key."""
        caller = await find_caller(request, self._tenants)
        given = await read_small(request, caller, KeyChanges)
        await caller.count_change(request, self._quota)
        key_id = request.match_info["id"]
        return json_response(describe_key(await self._manager.change(key_id, given, caller.actor, caller.principal)))

    async def change_any(self, request: web.Request) -> web.Response:
        given = await read_body(request, KeyChanges)
        return json_response(describe_key(await self._manager.change(request.match_info["id"], given, request[ACTOR])))

    async def revoke(self, request: web.Request) -> web.Response:
        """Revoke a tenant's own key."""
        caller: AdapterCaller = await find_caller(request, self._tenants)
        await caller.count_change(request, self._quota)
        await self._manager.revoke(request.match_info["id"], caller.actor, caller.principal)
        return _revoked(request)

    async def revoke_any(self, request: web.Request) -> web.Response:
        await self._manager.revoke(request.match_info["id"], request[ACTOR])
        return _revoked(request)


def _shown_once(key: ApiKey, clear: str) -> web.Response:
    return json_response(msgspec.structs.replace(describe_key(key), key=clear), status=201)


def _revoked(request: web.Request) -> web.Response:
    return json_response(RevokedKey(id=request.match_info["id"]))
