"""API keys in the database: owner, scopes and lifetime; of the secret only a keyed hash."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, Select, and_, bindparam, false, func, not_, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest, Conflict, Forbidden, RecordNotFound
from gateway.records.audit import record_change
from gateway.records.caches.changes import OPERATORS, count_change
from gateway.records.cooperative_rows import read_rows
from gateway.records.keys.removed import remove_keys
from gateway.records.keys.watched import Watched, find_watched
from gateway.records.sql.database import Database
from gateway.records.sql.tables import FORMER_COLUMNS, api_keys, tenants
from gateway.records.tenants.limits import Limits, read_limits, write_limits
from gateway.records.tenants.tenants import Tenant, read_tenant
from gateway.records.unchanged import check_unchanged

KEY_ID = re.compile(r"[0-9a-f]{16}")
# Most ids in one query.
MAX_IDS = 500
# Maximum valid keys of a tenant that makes keys itself, and maximum of its ended keys on record.
MAX_VALID, MAX_ENDED = 100, 400


class KeyLimitExceeded(Forbidden):
    """The tenant has reached the number of keys that it may make itself."""

    code = "key_limit_exceeded"


class KeyExists(Conflict):
    """A form that made a key was sent again, for example by a reload of the page with the secret."""

    code = "key_exists"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A stored key. secret_hash: keyed; the secret itself is not stored. tenant: None for an admin's key.

    allowed_models: the tenant's own names of models; None: all of them. family_id: shared by a key and its successors
    by rotation, whose limits are counted together. pepper: fingerprint of the pepper of `secret_hash`; None: unknown.
    check_digits: recorded once a former pepper issued the key and it was hashed again.
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
    pepper: str | None = None
    check_digits: str | None = None

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

    async def add(self, key: ApiKey, actor: str, *, bounded: bool = False) -> None:
        """Store a key. bounded: whether the tenant's number of keys is limited. Raises KeyLimitExceeded, KeyExists."""
        async with self._database.write() as connection:
            await _check_new(connection, key)
            if bounded:
                await _check_room(connection, key)
            await _insert(connection, key)
            await record_change(connection, actor, "key.create", key.id, _detail(key), tenant=_owner(key))
            await count_change(connection, key.scope)

    async def find(self, key_id: str) -> ApiKey | None:
        """Return the key with its tenant and limits, valid or not; None if there is no such key."""
        return (await self.find_all([key_id])).get(key_id)

    async def find_all(self, key_ids: Sequence[str]) -> dict[str, ApiKey]:
        """Return those of the keys that exist, by id; for the id of a tenant or session with its prefix, a key without
        scopes.
        """
        found = {}
        async with self._database.read() as connection:
            for first in range(0, len(key_ids), MAX_IDS):
                some = key_ids[first : first + MAX_IDS]
                rows = await connection.execute(KEYS.where(api_keys.c.id.in_(some)))
                found.update({row.key_id: read_key(row) for row in rows})
                found.update({each.id: _itself(each) for each in await find_watched(connection, some)})
        return found

    async def list(self, tenant: Tenant | None) -> Sequence[ApiKey]:
        """Return a tenant's keys, or the admin keys for None, oldest first."""
        owner = None if tenant is None else tenant.id
        query = KEYS.where(api_keys.c.tenant_id.is_not_distinct_from(owner))
        async with self._database.read() as connection:
            return await read_rows(connection, query.order_by(api_keys.c.created_at, api_keys.c.id), read_key)

    async def revoke(self, key_id: str, actor: str, tenant_id: str | None = None) -> None:
        """Revoke a key. A second revocation keeps the first one's time. tenant_id: revoke only a key of this tenant;
        None: any key.
        """
        async with self._database.write() as connection:
            key = await _locked(connection, key_id, tenant_id)
            if key.revoked_at is None:
                revoke = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=datetime.now(UTC))
                await connection.execute(revoke)
                await record_change(connection, actor, "key.revoke", key_id, tenant=_owner(key))
                await count_change(connection, key.scope)

    async def change(
        self,
        key_id: str,
        changes: Mapping[str, Any],
        actor: str,
        tenant_id: str | None = None,
        *,
        seen: ApiKey | None = None,
        check: Callable[[ApiKey], None] = lambda key: None,
    ) -> ApiKey:
        """Change `label` and limits of a valid key; return it. tenant_id: as in `revoke`.

        seen: the key on which the changes are based. check: called with the locked key before the change; its error
        prevents the change. Raises BadRequest if the key is not valid, or for limits of an
        admin's key; Changed if label or limits are no longer as in `seen`.
        """
        limits = {name: value for name, value in changes.items() if name != "label"}
        async with self._database.write() as connection:
            key = await _locked(connection, key_id, tenant_id)
            check_unchanged((key.label, key.limits), seen and (seen.label, seen.limits))
            if not key.valid(datetime.now(UTC)):
                raise BadRequest("This key is revoked or expired; make a new one instead.", param="id")
            if limits and key.tenant is None:
                raise BadRequest("An admin's key has no limits.", param=min(limits))
            check(key)
            new = msgspec.structs.replace(
                key, label=changes.get("label", key.label), limits=msgspec.structs.replace(key.limits, **limits)
            )
            values = {"label": new.label, **write_limits(new.limits)}
            await connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(**values))
            before = {name: key.label if name == "label" else getattr(key.limits, name) for name in changes}
            await record_change(
                connection, actor, "key.update", key_id, dict(changes), before=before, tenant=_owner(key)
            )
            await count_change(connection, key.scope)
        return new

    async def replace(
        self, new: ApiKey, old_id: str, expires_at: datetime, actor: str, *, bounded: bool = False
    ) -> ApiKey:
        """Add `new` with the old key's label and limits, and return it. The old key ends at `expires_at`, or at its own
        end if that is earlier.

        bounded: as in `add`. Raises BadRequest if the old key is not valid, KeyLimitExceeded, KeyExists.
        """
        async with self._database.write() as connection:
            # The deletion of a tenant locks the tenant before its keys. The same order here avoids a deadlock.
            await _lock_tenant(connection, new)
            old = await _locked(connection, old_id)
            await _check_new(connection, new)
            if not old.valid(datetime.now(UTC)):
                raise BadRequest("This key is revoked or expired; make a new one instead.", param="id")
            # `new` was made before the lock, and a change of the old key may have been stored since.
            new = msgspec.structs.replace(new, label=old.label, limits=old.limits)
            until = expires_at if old.expires_at is None else min(expires_at, old.expires_at)
            await connection.execute(update(api_keys).where(api_keys.c.id == old_id).values(expires_at=until))
            if bounded:
                await _check_room(connection, new)
            await _insert(connection, new)
            detail = _detail(new) | {"old": old_id, "old_expires_at": until.isoformat()}
            await record_change(connection, actor, "key.rotate", new.id, detail, tenant=_owner(new))
            await count_change(connection, new.scope)
        return new

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

    async def rehash(self, keys: Mapping[str, ApiKey]) -> None:
        """Store keys that were hashed under another pepper, by their former hash, unless it has changed since."""
        statement = (
            update(api_keys)
            .where(api_keys.c.id == bindparam("key"), api_keys.c.secret_hash == bindparam("former"))
            .values(
                secret_hash=bindparam("hash"),
                pepper=bindparam("new_pepper"),
                check_digits=func.coalesce(bindparam("digits"), api_keys.c.check_digits),
            )
        )
        rows = [
            {
                "key": key.id,
                "former": former,
                "hash": key.secret_hash,
                "new_pepper": key.pepper,
                "digits": key.check_digits,
            }
            for former, key in sorted(keys.items(), key=lambda each: each[1].id)
        ]
        async with self._database.write() as connection:
            await connection.execute(statement, rows)

    async def former_checks(self) -> dict[str, str]:
        """Return the recorded check digits of keys, by key id."""
        digits = api_keys.c.check_digits
        async with self._database.read() as connection:
            rows = await connection.execute(select(api_keys.c.id, digits).where(digits.is_not(None)))
            return {row.id: row.check_digits for row in rows}

    async def count_by_pepper(self) -> dict[str | None, int]:
        """Return the number of valid keys by their pepper's fingerprint; None: not used since these exist."""
        valid = and_(
            api_keys.c.revoked_at.is_(None),
            or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > datetime.now(UTC)),
        )
        query = select(api_keys.c.pepper, func.count()).where(valid).group_by(api_keys.c.pepper)
        async with self._database.read() as connection:
            return {row.pepper: row[1] for row in await connection.execute(query)}


_OWN = ("id", "created_at", "limits", *FORMER_COLUMNS)
KEYS: Select[Any] = select(
    *(api_keys.c[name].label(f"key_{name}") for name in _OWN),
    api_keys.c.label,
    api_keys.c.scopes,
    api_keys.c.secret_hash,
    api_keys.c.expires_at,
    api_keys.c.revoked_at,
    api_keys.c.last_used_at,
    api_keys.c.allowed_models,
    api_keys.c.family_id,
    api_keys.c.pepper,
    api_keys.c.check_digits,
    tenants,
).join_from(api_keys, tenants, isouter=True)


async def _locked(connection: AsyncConnection, key_id: str, tenant_id: str | None = None) -> ApiKey:
    if not KEY_ID.fullmatch(key_id):
        raise unknown_key(key_id)
    query = KEYS.where(api_keys.c.id == key_id).with_for_update(of=api_keys)
    if tenant_id is not None:
        query = query.where(api_keys.c.tenant_id == tenant_id)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise unknown_key(key_id)
    return read_key(row)


async def _check_new(connection: AsyncConnection, key: ApiKey) -> None:
    """Raise KeyExists if the key is stored. Call it before other checks: what the key itself caused would fail them."""
    if (await connection.execute(select(api_keys.c.id).where(api_keys.c.id == key.id))).first() is not None:
        raise _exists(key)


async def _insert(connection: AsyncConnection, key: ApiKey) -> None:
    insert: Any = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[connection.dialect.name]
    statement = insert(api_keys).values(**_values(key)).on_conflict_do_nothing(index_elements=["id"])
    if (await connection.execute(statement)).rowcount == 0:
        raise _exists(key)


def _exists(key: ApiKey) -> KeyExists:
    return KeyExists(
        f"This form has made the key {key.id} already, and its secret cannot be shown again. If you did not copy "
        "it, revoke that key and make another one with this form.",
        param="once",
    )


async def _lock_tenant(connection: AsyncConnection, key: ApiKey) -> None:
    if key.tenant is not None:
        await connection.execute(select(tenants.c.id).where(tenants.c.id == key.tenant.id).with_for_update())


async def _check_room(connection: AsyncConnection, key: ApiKey) -> None:
    """Raise KeyLimitExceeded if the tenant has MAX_VALID valid keys. Removes its oldest ended keys beyond MAX_ENDED."""
    assert key.tenant is not None  # admin keys are not bounded
    # The lock keeps two requests from counting at once.
    await _lock_tenant(connection, key)
    own, now = api_keys.c.tenant_id == key.tenant.id, datetime.now(UTC)
    ended = or_(api_keys.c.revoked_at.is_not(None), api_keys.c.expires_at <= now)
    has_ended = func.coalesce(ended, false())
    valid = await connection.scalar(select(func.count()).select_from(api_keys).where(own, not_(has_ended)))
    if (valid or 0) >= MAX_VALID:
        raise KeyLimitExceeded(
            f"Your tenant has {MAX_VALID} valid keys, the most that it may make itself. Revoke one first, or rotate "
            "one with grace_seconds 0."
        )
    oldest = select(api_keys.c.id).where(own, has_ended).order_by(api_keys.c.created_at.desc(), api_keys.c.id)
    beyond = list((await connection.execute(oldest.offset(MAX_ENDED).limit(MAX_IDS))).scalars())
    if beyond:
        await remove_keys(connection, key.tenant.id, beyond, now)


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


def _itself(watched: Watched) -> ApiKey:
    """Return a tenant or a session in the form of a key that no secret matches."""
    return ApiKey(**watched._asdict(), label="", scopes=frozenset(), secret_hash="")


def read_key(row: Row[Any]) -> ApiKey:
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
        pepper=row.pepper,
        check_digits=row.check_digits,
    )


def unknown_key(key_id: str) -> RecordNotFound:
    return RecordNotFound(f"There is no key with the id '{key_id[:64]}'.", param="id")
