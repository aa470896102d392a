"""`/admin/api/keys`: create, list, rotate and revoke API keys. Only the response that creates a key contains it."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from gateway.access.auth import ADMIN_SCOPE, TENANT_SCOPES, Authenticator
from gateway.access.scopes import ACTOR
from gateway.api.admin.tenants import LimitFields, ModelName
from gateway.api.requests.fields import json_response, read_body
from gateway.api.requests.named_models import check_models
from gateway.errors import BadRequest, RecordNotFound
from gateway.records.catalog import Catalog
from gateway.records.keys import KEY_ID, NO_KEY, ApiKey, Keys
from gateway.records.tenants import Tenants

Label = Annotated[str, Meta(max_length=100)]
Moment = Annotated[datetime, Meta(tz=True)]
LONGEST_LIFE = timedelta(days=100 * 366)
MAX_GRACE_SECONDS = 30 * 24 * 3600


class NewKey(LimitFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a tenant's new key. scopes: by default all of a tenant's. allowed_models: for inference; null: all."""

    label: Label = ""
    scopes: tuple[str, ...] = tuple(sorted(TENANT_SCOPES))
    expires_at: Moment | None = None
    allowed_models: Annotated[tuple[ModelName, ...], Meta(min_length=1, max_length=100)] | None = None


class NewAdminKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    label: Label = ""
    expires_at: Moment | None = None


class Rotation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a rotation. grace_seconds: the time for which the old key stays valid beside the new one."""

    grace_seconds: Annotated[int, Meta(ge=0, le=MAX_GRACE_SECONDS)] = 3600


class AdminKeys:
    """Routes for keys. A revocation takes effect here at once and on every other gateway within a second."""

    def __init__(self, *, auth: Authenticator, tenants: Tenants, keys: Keys, catalog: Catalog) -> None:
        self._auth = auth
        self._tenants = tenants
        self._keys = keys
        self._catalog = catalog

    async def create(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        given = await read_body(request, NewKey)
        unknown = set(given.scopes) - TENANT_SCOPES
        if unknown or not given.scopes:
            raise BadRequest(f"Expected some of the scopes {', '.join(sorted(TENANT_SCOPES))}.", param="scopes")
        _check_future(given.expires_at)
        tenant = await self._tenants.get(request.match_info["tenant"])
        names = given.allowed_models or ()
        await check_models(request, self._catalog, tenant, names, "allowed_models", saved_mixtures=True)
        key, clear = self._auth.issue(
            tenant,
            frozenset(given.scopes),
            given.label,
            expires_at=given.expires_at,
            allowed_models=given.allowed_models,
            limits=given.limits(),
        )
        await self._keys.add(key, actor)
        return _shown_once(key, clear)

    async def create_admin(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        given = await read_body(request, NewAdminKey)
        _check_future(given.expires_at)
        key, clear = self._auth.issue(None, frozenset({ADMIN_SCOPE}), given.label, expires_at=given.expires_at)
        await self._keys.add(key, actor)
        return _shown_once(key, clear)

    async def list(self, request: web.Request) -> web.Response:
        keys = await self._keys.list(await self._tenants.get(request.match_info["tenant"]))
        return json_response({"object": "list", "data": [describe_key(key) for key in keys]})

    async def list_admin(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [describe_key(key) for key in await self._keys.list(None)]})

    async def rotate(self, request: web.Request) -> web.Response:
        """Issue a key with the old key's scopes, lifetime and limits. The old key's usage counts against them."""
        actor = request[ACTOR]
        grace = (await read_body(request, Rotation)).grace_seconds
        key_id = request.match_info["id"]
        old = await self._keys.find(key_id) if KEY_ID.fullmatch(key_id) else None
        if old is None:
            raise RecordNotFound(NO_KEY, param="id")
        now = datetime.now(UTC)
        new, clear = self._auth.issue(
            old.tenant,
            old.scopes,
            old.label,
            expires_at=old.expires_at and now + (old.expires_at - old.created_at),
            allowed_models=old.allowed_models,
            limits=old.limits,
            family_id=old.family_id,
        )
        await self._keys.replace(new, key_id, now + timedelta(seconds=grace), actor)
        await self._auth.catch_up()
        return _shown_once(new, clear)

    async def revoke(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        key_id = request.match_info["id"]
        await self._keys.revoke(key_id, actor)
        await self._auth.catch_up()
        return json_response({"object": "api_key", "id": key_id, "revoked": True})


def _check_future(expires_at: datetime | None) -> None:
    if expires_at is not None and not timedelta(0) < expires_at - datetime.now(UTC) <= LONGEST_LIFE:
        raise BadRequest("expires_at: expected a moment in the future, within 100 years.", param="expires_at")


def _shown_once(key: ApiKey, clear: str) -> web.Response:
    return json_response({**describe_key(key), "key": clear}, status=201)


def describe_key(key: ApiKey) -> dict[str, Any]:
    """Return a key as the API shows it, without the secret."""
    return {
        "object": "api_key",
        "id": key.id,
        "tenant": key.tenant.name if key.tenant else None,
        "label": key.label,
        "scopes": sorted(key.scopes),
        "allowed_models": key.allowed_models,
        **msgspec.structs.asdict(key.limits),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
    }
