"""Creation, rotation and revocation of keys, with the rules for operators and for tenants' callers.

A tenant's caller may create no key with more rights than its own, and raise no key's limit above its own: the scopes,
models, lifetime and limits are bounded by those of the key or session in use. It may lower any limit. Each key's usage
counts for itself; only the tenant's limits bound all of its keys together.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.access.auth import Authenticator, TenantPrincipal
from gateway.access.roles import ADMIN_SCOPES, DEFAULT_SCOPES, TENANT_SCOPES, AdminRole, admin_role, tenant_role
from gateway.api.admin.tenants import LimitFields, ModelName
from gateway.api.requests.named_models import check_names
from gateway.errors import BadRequest, Forbidden
from gateway.limits.kinds import REQUEST_KINDS
from gateway.records.adapters.catalog import Catalog
from gateway.records.keys.keys import KEY_ID, ApiKey, Keys, unknown_key
from gateway.records.tenants.limits import Limits
from gateway.records.tenants.tenants import Tenant
from wire.money import format_money

Label = Annotated[str, Meta(max_length=100)]
Moment = Annotated[datetime, Meta(tz=True)]
MAX_LIFE = timedelta(days=100 * 366)
MAX_GRACE_SECONDS = 30 * 24 * 3600


class NewKey(LimitFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a tenant's new key.

    scopes: by default all but `keys`; for a tenant's caller, limited to the caller's. allowed_models: for inference;
    null: all or, for a tenant's caller, the caller's. expires_at: null: never or, for a tenant's caller, when the
    caller's key expires. An absent limit: none or, for a tenant's caller, the caller's.
    """

    label: Label = ""
    scopes: tuple[str, ...] | UnsetType = UNSET
    expires_at: Moment | None = None
    allowed_models: Annotated[tuple[ModelName, ...], Meta(min_length=1, max_length=100)] | None = None


class NewAdminKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    label: Label = ""
    expires_at: Moment | None = None
    role: AdminRole = "operator"


class KeyChanges(LimitFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for changes of a key. An absent field stays as it is; a limit of null is removed."""

    label: Label | UnsetType = UNSET


class Rotation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a rotation. grace_seconds: the time for which the old key stays valid beside the new one."""

    grace_seconds: Annotated[int, Meta(ge=0, le=MAX_GRACE_SECONDS)] = 3600


class KeyManager:
    """Rules and changes of keys. actor: id of the caller's key, or the subject of its session. by: the caller's
    principal; None for an operator. A change takes effect here at once and on every other gateway within a second.
    """

    def __init__(self, *, auth: Authenticator, keys: Keys, catalog: Catalog) -> None:
        self._auth = auth
        self._keys = keys
        self._catalog = catalog

    async def create(
        self,
        tenant: Tenant,
        new_key: NewKey,
        actor: str,
        by: TenantPrincipal | None = None,
        *,
        force: bool = False,
        key_id: str | None = None,
    ) -> tuple[ApiKey, str]:
        """Return a tenant's new key and its clear text. force: accept models that do not exist yet. key_id: its id.

        Raises BadRequest, Conflict for an id that exists and, for a tenant's caller, Forbidden.
        """
        own = TENANT_SCOPES if by is None else by.scopes
        scopes = DEFAULT_SCOPES & own if new_key.scopes is UNSET else frozenset(new_key.scopes)
        if scopes - TENANT_SCOPES or not scopes:
            raise BadRequest(f"Expected some of the scopes {', '.join(sorted(TENANT_SCOPES))}.", param="scopes")
        check_future(new_key.expires_at)
        models, expires_at, limits = new_key.allowed_models, new_key.expires_at, new_key.limits()
        if by is not None:
            expires_at = _not_after(by, expires_at)
            if models is None:
                models = by.allowed_models
            limits = new_key.limits(by.key_limits)
            _check_within(by, scopes, models)
            _check_limits(by, msgspec.structs.asdict(limits))
        # A caller with allowed models has passed `_check_within`; an error here could reveal the tenant's other models.
        if not force and (by is None or by.allowed_models is None):
            await check_names(self._catalog, tenant, models or (), "allowed_models", saved_mixtures=True)
        key, clear = self._auth.issue(
            tenant,
            scopes,
            new_key.label,
            expires_at=expires_at,
            allowed_models=models,
            limits=limits,
            key_id=key_id,
        )
        await self._keys.add(key, actor, bounded=by is not None)
        return key, clear

    async def create_admin(self, new_key: NewAdminKey, actor: str, *, key_id: str | None = None) -> tuple[ApiKey, str]:
        """Return a new admin key and its clear text. key_id: its id. Raises BadRequest, Conflict."""
        check_future(new_key.expires_at)
        scopes = frozenset({ADMIN_SCOPES[new_key.role]})
        key, clear = self._auth.issue(None, scopes, new_key.label, expires_at=new_key.expires_at, key_id=key_id)
        await self._keys.add(key, actor)
        return key, clear

    async def list(self, tenant: Tenant | None) -> Sequence[ApiKey]:
        """Return a tenant's keys, or the admin keys for None."""
        return await self._keys.list(tenant)

    async def rotate(
        self,
        key_id: str,
        grace_seconds: int,
        actor: str,
        by: TenantPrincipal | None = None,
        *,
        new_id: str | None = None,
    ) -> tuple[ApiKey, str]:
        """Issue a key with the old key's scopes, lifetime and limits. The old key's usage counts against these limits.

        new_id: the new key's id. Raises RecordNotFound, BadRequest, Conflict for an id that exists and, for a tenant's
        caller, Forbidden.
        """
        old = await self._keys.find(key_id) if KEY_ID.fullmatch(key_id) else None
        if old is None or (by is not None and (old.tenant is None or old.tenant.id != by.tenant.id)):
            raise unknown_key(key_id)
        now = datetime.now(UTC)
        expires_at = old.expires_at and now + (old.expires_at - old.created_at)
        if by is not None:
            _check_within(by, old.scopes, old.allowed_models)
            _check_limits(by, msgspec.structs.asdict(old.limits))
            # A key that expires must not be able to extend its own life.
            expires_at = by.expires_at if expires_at is None else _earlier(expires_at, by.expires_at)
        new, clear = self._auth.issue(
            old.tenant,
            old.scopes,
            old.label,
            expires_at=expires_at,
            allowed_models=old.allowed_models,
            limits=old.limits,
            family_id=old.family_id,
            key_id=new_id,
        )
        until = now + timedelta(seconds=grace_seconds)
        new = await self._keys.replace(new, key_id, until, actor, bounded=by is not None)
        await self._auth.catch_up()
        return new, clear

    async def change(
        self,
        key_id: str,
        changed_fields: KeyChanges,
        actor: str,
        by: TenantPrincipal | None = None,
        *,
        seen: ApiKey | None = None,
    ) -> ApiKey:
        """Change a key's label and limits. seen: the key on which the changes are based.

        Raises RecordNotFound, also for another tenant's key, BadRequest, Changed and, for a tenant's caller, Forbidden.
        """
        changes = changed_fields.given()
        if not changes:
            raise BadRequest("Expected a label or a limit to change.")

        def check(present: ApiKey) -> None:
            if by is not None:
                _check_limits(by, changes, present.limits)

        tenant_id = None if by is None else by.tenant.id
        key = await self._keys.change(key_id, changes, actor, tenant_id, seen=seen, check=check)
        await self._auth.catch_up()
        return key

    async def revoke(self, key_id: str, actor: str, by: TenantPrincipal | None = None) -> None:
        """Revoke a key. Raises RecordNotFound, also for another tenant's key."""
        await self._keys.revoke(key_id, actor, None if by is None else by.tenant.id)
        await self._auth.catch_up()


def _check_within(by: TenantPrincipal, scopes: frozenset[str], models: Sequence[str] | None) -> None:
    """Raise Forbidden for scopes or models beyond those of the caller."""
    beyond = sorted(scopes - by.scopes)
    if beyond:
        own = ", ".join(sorted(by.scopes))
        message = f"scopes: your key cannot give '{beyond[0]}', only its own: {own}."
        raise Forbidden(message, param="scopes")
    if by.allowed_models is not None:
        if models is None:
            raise Forbidden("allowed_models: your key is limited to some models, this one is not.", param="id")
        for model in models:
            by.check_model(model)


def _check_limits(by: TenantPrincipal, limits: Mapping[str, Any], present: Limits | None = None) -> None:
    """Raise Forbidden for a limit above the caller's own, or for null (no limit) where the caller has one.

    present: limits of the key that is changed. A limit that is not above its present one is allowed.
    """
    for kind in REQUEST_KINDS:
        own, given = getattr(by.key_limits, kind.name), limits.get(kind.name, 0)
        is_raised = present is None or not _is_within(given, getattr(present, kind.name))
        if is_raised and not _is_within(given, own):
            most = f"{format_money(own)} ({own} micro-units)" if kind.is_budget else str(own)
            raise Forbidden(f"{kind.name}: your key can give at most its own limit, {most}.", param=kind.name)


def _is_within(limit: int | None, bound: int | None) -> bool:
    return bound is None or (limit is not None and limit <= bound)


def _not_after(by: TenantPrincipal, expires_at: datetime | None) -> datetime | None:
    """Return the expiry of a key that the caller makes. Raises BadRequest if it is after the caller's own."""
    if by.expires_at is not None and expires_at is not None and expires_at > by.expires_at:
        end = by.expires_at.isoformat(timespec="seconds")
        raise BadRequest(f"expires_at: expected a time not after the end of your own key, {end}.", param="expires_at")
    return expires_at or by.expires_at


def _earlier(moment: datetime, bound: datetime | None) -> datetime:
    return moment if bound is None else min(moment, bound)


def check_future(expires_at: datetime | None) -> None:
    """Raise BadRequest for an expiry in the past or too far ahead."""
    if expires_at is not None and not timedelta(0) < expires_at - datetime.now(UTC) <= MAX_LIFE:
        raise BadRequest("expires_at: expected a time in the future, within 100 years.", param="expires_at")


class ShownKey(Limits, frozen=True, kw_only=True, omit_defaults=False):  # type: ignore[call-arg]
    """A key without its secret, with its own limits. tenant: null for an operator's key.

    key: the secret, in the answer that creates the key.
    """

    object: Literal["api_key"] = "api_key"
    id: str
    tenant: str | None
    label: str
    role: str | None
    scopes: list[str]
    allowed_models: Sequence[str] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    key: str | UnsetType = UNSET


class KeyList(Struct, frozen=True, kw_only=True):
    """Keys. total: their number on all pages, of an answer in pages."""

    object: Literal["list"] = "list"
    data: list[ShownKey]
    total: int | UnsetType = UNSET
    has_more: bool | UnsetType = UNSET


class RevokedKey(Struct, frozen=True, kw_only=True):
    object: Literal["api_key"] = "api_key"
    id: str
    revoked: bool = True


def describe_key(key: ApiKey) -> ShownKey:
    """Return a key as the API shows it, without the secret."""
    return ShownKey(
        id=key.id,
        tenant=key.tenant.name if key.tenant else None,
        label=key.label,
        role=tenant_role(key.scopes) if key.tenant else admin_role(key.scopes),
        scopes=sorted(key.scopes),
        allowed_models=key.allowed_models,
        **msgspec.structs.asdict(key.limits),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
    )
