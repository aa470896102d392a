"""API keys in the database: owner, scopes and lifetime; of the secret only a keyed hash."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, Select, bindparam, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest, RecordNotFound
from gateway.records.audit import record_change
from gateway.records.changes import OPERATORS, count_change
from gateway.records.database import Database
from gateway.records.limits import Limits, read_limits, write_limits
from gateway.records.tables import FORMER_COLUMNS, api_keys, tenants
from gateway.records.tenants import Tenant, read_tenant

KEY_ID = re.compile(r"[0-9a-f]{16}")
NO_KEY = "There is no key of this id."
# Most ids in one query.
MAX_IDS = 500


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A stored key. secret_hash: keyed; the secret itself is not stored. tenant: None for an admin's key.

    allowed_models: the tenant's own names of models; None: all of them. family_id: shared by a key and its successors
    by rotation, whose limits are counted together.
    """

    id: str
    tenant: Tenant | None
    label: str
    scopes: frozenset[str]
    secret_hash: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    allowed_models: tuple[str, ...] | None = None
    limits: Limits = Limits()
    family_id: str = ""

    def __post_init__(self) -> None:
        if not self.family_id:
            msgspec.structs.force_setattr(self, "family_id", self.id)

    @property
    def scope(self) -> str:
        """Return the scope of the change counter that the key depends on: its tenant's, or the operators'."""
        return OPERATORS if self.tenant is None else self.tenant.id

    def valid(self, now: datetime) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class Keys:
    """The table of keys. Raises RecordNotFound."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, key: ApiKey, actor: str) -> None:
        async with self._database.write() as connection:
            await connection.execute(insert(api_keys).values(**_values(key)))
            await record_change(connection, actor, "key.create", key.id, _detail(key), tenant=_owner(key))
            await count_change(connection, key.scope)

    async def find(self, key_id: str) -> ApiKey | None:
        """Return the key with its tenant and limits, valid or not; None if there is no such key."""
        async with self._database.read() as connection:
            row = (await connection.execute(_KEYS.where(api_keys.c.id == key_id))).one_or_none()
        return None if row is None else _key(row)

    async def find_all(self, key_ids: Sequence[str]) -> dict[str, ApiKey]:
        """Return those of the keys that exist, by id."""
        found = {}
        async with self._database.read() as connection:
            for first in range(0, len(key_ids), MAX_IDS):
                some = key_ids[first : first + MAX_IDS]
                rows = await connection.execute(_KEYS.where(api_keys.c.id.in_(some)))
                found.update({row.key_id: _key(row) for row in rows})
        return found

    async def list(self, tenant: Tenant | None) -> Sequence[ApiKey]:
        """Return a tenant's keys, or the admin keys for None, oldest first."""
        owner = None if tenant is None else tenant.id
        query = _KEYS.where(api_keys.c.tenant_id.is_not_distinct_from(owner))
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(api_keys.c.created_at, api_keys.c.id))).all()
        return [_key(row) for row in rows]

    async def revoke(self, key_id: str, actor: str) -> None:
        """Revoke a key. A second revocation keeps the first one's time."""
        async with self._database.write() as connection:
            key = await _locked(connection, key_id)
            if key.revoked_at is None:
                revoke = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=datetime.now(UTC))
                await connection.execute(revoke)
                await record_change(connection, actor, "key.revoke", key_id, tenant=_owner(key))
                await count_change(connection, key.scope)

    async def replace(self, new: ApiKey, old_id: str, expires_at: datetime, actor: str) -> None:
        """Add `new`. The old key ends at `expires_at`, or at its own end if that is earlier.

        Raises BadRequest if the old key is not valid.
        """
        async with self._database.write() as connection:
            old = await _locked(connection, old_id)
            if not old.valid(datetime.now(UTC)):
                raise BadRequest("This key is revoked or expired; make a new one instead.", param="id")
            until = expires_at if old.expires_at is None else min(expires_at, old.expires_at)
            await connection.execute(update(api_keys).where(api_keys.c.id == old_id).values(expires_at=until))
            await connection.execute(insert(api_keys).values(**_values(new)))
            detail = _detail(new) | {"old": old_id, "old_expires_at": until.isoformat()}
            await record_change(connection, actor, "key.rotate", new.id, detail, tenant=_owner(new))
            await count_change(connection, new.scope)

    async def touch(self, used: Mapping[str, datetime]) -> None:
        """Store the times of the keys' last uses. An older time never replaces a newer one."""
        later = or_(api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at < bindparam("at"))
        statement = (
            update(api_keys).where(api_keys.c.id == bindparam("key"), later).values(last_used_at=bindparam("at"))
        )
        # The order is the same everywhere, so that two gateways never wait for each other's rows.
        rows = [{"key": key_id, "at": used[key_id]} for key_id in sorted(used)]
        async with self._database.write() as connection:
            await connection.execute(statement, rows)


_OWN = ("id", "created_at", "limits", *FORMER_COLUMNS)
_KEYS: Select[Any] = select(
    *(api_keys.c[name].label(f"key_{name}") for name in _OWN),
    api_keys.c.label,
    api_keys.c.scopes,
    api_keys.c.secret_hash,
    api_keys.c.expires_at,
    api_keys.c.revoked_at,
    api_keys.c.last_used_at,
    api_keys.c.allowed_models,
    api_keys.c.family_id,
    tenants,
).join_from(api_keys, tenants, isouter=True)


async def _locked(connection: AsyncConnection, key_id: str) -> ApiKey:
    if not KEY_ID.fullmatch(key_id):
        raise RecordNotFound(NO_KEY, param="id")
    query = _KEYS.where(api_keys.c.id == key_id).with_for_update(of=api_keys)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise RecordNotFound(NO_KEY, param="id")
    return _key(row)


def _values(key: ApiKey) -> dict[str, Any]:
    """Return the column values of a key."""
    values = msgspec.structs.asdict(key)
    tenant, limits = values.pop("tenant"), values.pop("limits")
    return {
        **values,
        **write_limits(limits),
        "tenant_id": None if tenant is None else tenant.id,
        "scopes": ",".join(sorted(key.scopes)),
        "allowed_models": None if key.allowed_models is None else msgspec.json.encode(key.allowed_models).decode(),
    }


def _owner(key: ApiKey) -> str | None:
    return None if key.tenant is None else key.tenant.name


def _detail(key: ApiKey) -> dict[str, Any]:
    return {
        "label": key.label,
        "scopes": sorted(key.scopes),
        "expires_at": key.expires_at and key.expires_at.isoformat(),
        "allowed_models": key.allowed_models,
        "limits": key.limits,
    }


def _key(row: Row[Any]) -> ApiKey:
    models = row.allowed_models
    return ApiKey(
        id=row.key_id,
        tenant=None if row.id is None else read_tenant(row),
        label=row.label,
        scopes=frozenset(row.scopes.split(",")),
        secret_hash=row.secret_hash,
        created_at=row.key_created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
        allowed_models=None if models is None else msgspec.json.decode(models, type=tuple[str, ...]),
        family_id=row.family_id or row.key_id,
        limits=read_limits(row, "key_"),
    )
