"""Records of adapter uploads that arrive in parts.

The bytes are in the adapter store; the tables here record the parts that count. So an upload continues at any gateway,
also after a restart.
"""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, and_, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import AdapterLimitExceeded, RecordNotFound, WrongOffset
from gateway.records.adapters.limits import check_bytes
from gateway.records.adapters.rows import lock_tenant
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import adapter_upload_parts, adapter_uploads
from gateway.records.tenants.tenants import Tenant
from wire.model_names import ADAPTER_NAME

# Maximum number of unfinished uploads of a tenant.
MAX_UPLOADS = 16
# An upload without a new part for this time is removed.
KEPT = timedelta(hours=24)


class PartialUpload(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished upload. num_bytes, sha256: declared for the whole archive. received: number of bytes so far."""

    id: str
    name: str
    num_bytes: int
    sha256: str
    received: int
    updated_at: datetime

    @property
    def expires_at(self) -> datetime:
        return self.updated_at + KEPT


class Uploads:
    """The table of unfinished uploads. Raises RecordNotFound for an unknown upload and for another tenant's alike."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, tenant: Tenant, name: str, num_bytes: int, sha256: str) -> PartialUpload:
        """Add an upload, or return the tenant's unfinished one of the same name and content.

        Its declared size counts against `max_adapter_bytes` until it is finished. Raises AdapterLimitExceeded.
        """
        table, now = adapter_uploads, datetime.now(UTC)
        own = and_(table.c.tenant_id == tenant.id, table.c.updated_at > now - KEPT)
        async with self._database.write() as connection:
            await lock_tenant(connection, tenant.id)
            same = and_(own, table.c.name == name, table.c.sha256 == sha256, table.c.num_bytes == num_bytes)
            row = (await connection.execute(select(table).where(same).limit(1))).one_or_none()
            if row is not None:
                return _read(row)
            sums = select(func.count(), int_sum(table.c.num_bytes)).where(own)
            count, waiting = (await connection.execute(sums)).one()
            if count >= MAX_UPLOADS:
                raise AdapterLimitExceeded(
                    f"This tenant has {count} unfinished uploads, and {MAX_UPLOADS} are allowed; finish or abort one.",
                    param="max_adapter_bytes",
                )
            limit = tenant.adapter_limits.max_adapter_bytes
            if limit is not None:
                await check_bytes(connection, tenant.id, num_bytes, limit, unfinished=int(waiting))
            upload = PartialUpload(
                id=uuid.uuid4().hex, name=name, num_bytes=num_bytes, sha256=sha256, received=0, updated_at=now
            )
            await connection.execute(insert(table).values(tenant_id=tenant.id, **msgspec.structs.asdict(upload)))
        return upload

    async def get(self, tenant: Tenant, upload_id: str) -> PartialUpload:
        async with self._database.read() as connection:
            row = (await connection.execute(select(adapter_uploads).where(_own(tenant, upload_id)))).one_or_none()
        if row is None:
            raise RecordNotFound("There is no unfinished upload of this id.", param="id")
        return _read(row)

    async def of_name(self, tenant: Tenant, name: str) -> list[PartialUpload]:
        """Return the tenant's unfinished uploads of a name."""
        if not ADAPTER_NAME.fullmatch(name):
            return []
        table = adapter_uploads
        is_kept = table.c.updated_at > datetime.now(UTC) - KEPT
        query = select(table).where(table.c.tenant_id == tenant.id, table.c.name == name, is_kept)
        async with self._database.read() as connection:
            return [_read(row) for row in (await connection.execute(query.order_by(table.c.id))).all()]

    async def add_part(self, tenant: Tenant, upload_id: str, start: int, num_bytes: int, part_id: str) -> PartialUpload:
        """Record a saved part. Raises WrongOffset unless it starts at the end of the previous part."""
        table, now = adapter_uploads, datetime.now(UTC)
        async with self._database.write() as connection:
            query = select(table).where(_own(tenant, upload_id)).with_for_update()
            row = (await connection.execute(query)).one_or_none()
            if row is None:
                raise RecordNotFound("There is no unfinished upload of this id.", param="id")
            if row.received != start:
                raise WrongOffset(row.received)
            await connection.execute(
                insert(adapter_upload_parts).values(upload_id=upload_id, start=start, part_id=part_id)
            )
            received = start + num_bytes
            values = {"received": received, "updated_at": now}
            await connection.execute(update(table).where(table.c.id == upload_id).values(**values))
        return msgspec.structs.replace(_read(row), received=received, updated_at=now)

    async def parts(self, upload_id: str) -> Sequence[str]:
        """Return the ids of the recorded parts, in order."""
        table = adapter_upload_parts
        query = select(table.c.part_id).where(table.c.upload_id == upload_id).order_by(table.c.start)
        async with self._database.read() as connection:
            return (await connection.execute(query)).scalars().all()

    async def remove(self, upload_id: str) -> None:
        async with self._database.write() as connection:
            await connection.execute(delete(adapter_uploads).where(adapter_uploads.c.id == upload_id))

    async def remove_expired(self) -> Sequence[str]:
        """Remove the uploads without a new part for KEPT, and return their ids."""
        table = adapter_uploads
        query = delete(table).where(table.c.updated_at <= datetime.now(UTC) - KEPT).returning(table.c.id)
        async with self._database.write() as connection:
            return (await connection.execute(query)).scalars().all()

    async def known(self, upload_ids: Sequence[str]) -> set[str]:
        """Return those of the ids that are on record."""
        query = select(adapter_uploads.c.id).where(adapter_uploads.c.id.in_(upload_ids))
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars())


async def unfinished_bytes(connection: AsyncConnection, tenant_id: str, except_id: str | None) -> int:
    """Return the declared bytes of a tenant's unfinished uploads. except_id: id of an upload that does not count."""
    table = adapter_uploads
    query = select(int_sum(table.c.num_bytes)).where(
        table.c.tenant_id == tenant_id, table.c.updated_at > datetime.now(UTC) - KEPT, table.c.id != (except_id or "")
    )
    return (await connection.execute(query)).scalar_one()


def _own(tenant: Tenant, upload_id: str) -> ColumnElement[bool]:
    table = adapter_uploads
    is_kept = table.c.updated_at > datetime.now(UTC) - KEPT
    return and_(table.c.id == upload_id, table.c.tenant_id == tenant.id, is_kept)


def _read(row: Row[Any]) -> PartialUpload:
    return PartialUpload(**{name: getattr(row, name) for name in PartialUpload.__struct_fields__})
