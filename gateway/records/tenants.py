"""Tenants, their limits, and their API keys."""

import re
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from gateway.errors import BadRequest, NameTaken, RecordNotFound
from gateway.records.audit import record_change
from gateway.records.database import Database
from gateway.records.tables import api_keys, tenants

TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
KEY_ID = re.compile(r"[0-9a-f]{16}")
NO_TENANT = "There is no tenant of this name."
NO_KEY = "There is no key of this id."


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may use. weight: its share of an engine that is full, relative to the others'."""

    requests_per_minute: int = 600
    tokens_per_minute: int = 200_000
    max_concurrent: int = 32
    weight: float = 1.0


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    limits: Limits
    created_at: datetime


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key as stored: `secret_hash` is keyed, the secret itself is nowhere. tenant None: an admin's key."""

    id: str
    tenant: Tenant | None
    label: str
    scopes: frozenset[str]
    secret_hash: str
    created_at: datetime
    revoked_at: datetime | None


class Tenants:
    """Raises RecordNotFound and NameTaken."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str, limits: Limits, actor: str) -> Tenant:
        if not TENANT_NAME.fullmatch(name):
            raise BadRequest(
                "Expected a tenant name of 1 to 64 characters a-z, 0-9, '.', '_' and '-', "
                "starting with a letter or digit.",
                param="name",
            )
        tenant = Tenant(id=uuid.uuid4().hex, name=name, limits=limits, created_at=datetime.now(UTC))
        values = {"id": tenant.id, "name": name, "created_at": tenant.created_at, **msgspec.structs.asdict(limits)}
        try:
            async with self._database.write() as connection:
                await connection.execute(insert(tenants).values(**values))
                await record_change(connection, actor, "tenant.create", name, msgspec.structs.asdict(limits))
        except IntegrityError as error:
            raise NameTaken(f"A tenant named '{name}' exists already.", param="name") from error
        return tenant

    async def get(self, name: str) -> Tenant:
        _check_possible(name)
        async with self._database.read() as connection:
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one_or_none()
        if row is None:
            raise RecordNotFound(NO_TENANT, param="tenant")
        return _tenant(row)

    async def list(self) -> list[Tenant]:
        async with self._database.read() as connection:
            rows = (await connection.execute(select(tenants).order_by(tenants.c.name))).all()
        return [_tenant(row) for row in rows]

    async def update(self, name: str, changes: dict[str, Any], actor: str) -> Tenant:
        """changes: columns of Limits to set; none is allowed, and changes nothing."""
        _check_possible(name)
        async with self._database.write() as connection:
            if changes:
                await connection.execute(update(tenants).where(tenants.c.name == name).values(**changes))
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one_or_none()
            if row is None:
                raise RecordNotFound(NO_TENANT, param="tenant")
            await record_change(connection, actor, "tenant.update", name, changes)
        return _tenant(row)

    async def delete(self, name: str, actor: str) -> None:
        """With its keys and adapter names. Usage and audit rows stay."""
        _check_possible(name)
        async with self._database.write() as connection:
            result = await connection.execute(delete(tenants).where(tenants.c.name == name))
            if result.rowcount == 0:
                raise RecordNotFound(NO_TENANT, param="tenant")
            await record_change(connection, actor, "tenant.delete", name)

    async def add_key(self, key: ApiKey, actor: str) -> None:
        values = {
            "id": key.id,
            "tenant_id": key.tenant.id if key.tenant else None,
            "label": key.label,
            "scopes": ",".join(sorted(key.scopes)),
            "secret_hash": key.secret_hash,
            "created_at": key.created_at,
            "revoked_at": key.revoked_at,
        }
        detail = {"tenant": key.tenant.name if key.tenant else None, "scopes": sorted(key.scopes)}
        async with self._database.write() as connection:
            await connection.execute(insert(api_keys).values(**values))
            await record_change(connection, actor, "key.create", key.id, detail)

    async def find_key(self, key_id: str) -> ApiKey | None:
        """The key with its tenant and limits, revoked or not; None if there is no such key."""
        async with self._database.read() as connection:
            row = (await connection.execute(_KEYS.where(api_keys.c.id == key_id))).one_or_none()
        return None if row is None else _key(row)

    async def list_keys(self, tenant: Tenant) -> Sequence[ApiKey]:
        query = _KEYS.where(api_keys.c.tenant_id == tenant.id).order_by(api_keys.c.created_at, api_keys.c.id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [_key(row) for row in rows]

    async def revoke_key(self, key_id: str, actor: str) -> None:
        """Revoking twice keeps the first moment."""
        if not KEY_ID.fullmatch(key_id):
            raise RecordNotFound(NO_KEY, param="id")
        async with self._database.write() as connection:
            row = (await connection.execute(select(api_keys).where(api_keys.c.id == key_id))).one_or_none()
            if row is None:
                raise RecordNotFound(NO_KEY, param="id")
            if row.revoked_at is None:
                revoke = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=datetime.now(UTC))
                await connection.execute(revoke)
                await record_change(connection, actor, "key.revoke", key_id)


_KEYS = select(
    api_keys.c.id.label("key_id"),
    api_keys.c.label,
    api_keys.c.scopes,
    api_keys.c.secret_hash,
    api_keys.c.created_at.label("key_created_at"),
    api_keys.c.revoked_at,
    tenants,
).join_from(api_keys, tenants, isouter=True)


def _check_possible(name: str) -> None:
    """What cannot be a name is not found, before a database meets characters it cannot hold."""
    if not TENANT_NAME.fullmatch(name):
        raise RecordNotFound(NO_TENANT, param="tenant")


def _tenant(row: Row[Any]) -> Tenant:
    limits = Limits(
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        max_concurrent=row.max_concurrent,
        weight=row.weight,
    )
    return Tenant(id=row.id, name=row.name, limits=limits, created_at=row.created_at)


def _key(row: Row[Any]) -> ApiKey:
    return ApiKey(
        id=row.key_id,
        tenant=None if row.id is None else _tenant(row),
        label=row.label,
        scopes=frozenset(row.scopes.split(",")),
        secret_hash=row.secret_hash,
        created_at=row.key_created_at,
        revoked_at=row.revoked_at,
    )
