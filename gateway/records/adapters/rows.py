"""Rows of an adapter's name and its versions, and the queries that versions and aliases share."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, Select, and_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import RecordNotFound
from gateway.records.bases.base import FIRST
from gateway.records.sql.tables import adapter_versions, adapters, tenants
from gateway.records.version_state import READY, State
from wire.model_names import ADAPTER_NAME


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Reason of a rejection, as in the error of an upload."""

    message: str
    param: str | None = None
    code: str | None = None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A version of an adapter. digest: 64 hex digits; empty for a refused upload, which has no content.

    expires_at: end of its service; None means never. It is `retired` from then on. base: id of its base model.
    """

    name: str
    version: int
    state: State
    digest: str = ""
    rank: int = 0
    num_bytes: int = 0
    created_at: datetime | None = None
    expires_at: datetime | None = None
    pinned: bool = False
    reasons: tuple[Reason, ...] = ()
    base: str = FIRST

    @property
    def is_served(self) -> bool:
        return self.state == READY and not is_over(self.expires_at)


def is_over(expires_at: datetime | None) -> bool:
    return expires_at is not None and expires_at <= datetime.now(UTC)


async def lock_name(connection: AsyncConnection, tenant_id: str, name: str) -> Row[Any] | None:
    """Return the row of a tenant's name, locked until the transaction ends; None if there is none.

    On SQLite the database's write lock already excludes other writers. Raises RecordNotFound for an impossible name.
    """
    check_possible(name)
    owned = and_(adapters.c.tenant_id == tenant_id, adapters.c.name == name)
    return (await connection.execute(select(adapters).where(owned).with_for_update())).one_or_none()


async def lock_tenant(connection: AsyncConnection, tenant_id: str) -> Row[Any] | None:
    """Return the tenant's row, locked until the transaction ends; None if there is none.

    It orders changes of a tenant on PostgreSQL. Names are locked before it and new names are inserted after it, so that
    no two changes wait for each other.
    """
    return (await connection.execute(select(tenants).where(tenants.c.id == tenant_id).with_for_update())).one_or_none()


async def lock_known_name(connection: AsyncConnection, tenant_id: str, name: str) -> Row[Any]:
    """Return the locked row of a tenant's name. Raises RecordNotFound."""
    own = await lock_name(connection, tenant_id, name)
    if own is None:
        raise unknown_name(name)
    return own


async def versions_of(connection: AsyncConnection, tenant_id: str, name: str) -> dict[int, Version]:
    """Return the versions of a name by number."""
    found = (await connection.execute(select_versions(tenant_id, name))).all()
    return {row.version: read_version(row) for row in found}


def select_versions(tenant_id: str, name: str) -> Select[Any]:
    """Select the versions of a tenant's name, by number. Raises RecordNotFound for an impossible name."""
    check_possible(name)
    return (
        select(adapters.c.name, adapter_versions)
        .join_from(adapters, adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
        .where(adapters.c.tenant_id == tenant_id, adapters.c.name == name)
        .order_by(adapter_versions.c.version)
    )


def read_version(row: Row[Any]) -> Version:
    """Return the version of a row of `adapter_versions` with the adapter's name."""
    return Version(
        name=row.name,
        version=row.version,
        state="retired" if row.state == READY and is_over(row.expires_at) else row.state,
        digest=row.digest,
        rank=row.rank,
        num_bytes=row.num_bytes,
        created_at=row.created_at,
        expires_at=row.expires_at,
        pinned=row.pinned,
        reasons=() if row.reasons is None else msgspec.json.decode(row.reasons, type=tuple[Reason, ...]),
        base=row.base_id or FIRST,
    )


def check_possible(name: str) -> None:
    """Raise RecordNotFound for an impossible name, before its characters reach a database that may refuse them."""
    if not ADAPTER_NAME.fullmatch(name):
        raise unknown_name(name)


def unknown_name(name: str) -> RecordNotFound:
    return RecordNotFound(f"There is no adapter '{name[:64]}'.", param="name")


def unknown_version() -> RecordNotFound:
    return RecordNotFound("The adapter has no version of this number.", param="version")
