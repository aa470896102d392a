"""Removed versions of adapters: their names' prices and limits still apply, and their bytes count until collected.

The deletion of a name, or a push beyond the newest KEPT_VERSIONS, moves versions here in its own transaction. A name's
prices and limits apply to every digest that the name ever meant, so neither a push nor a deletion removes them from the
content. A tenant's newest REMEMBERED rows stay, and all rows younger than UNUSED_SECONDS.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, and_, delete, func, insert, select, tuple_, union, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import adapter_versions, adapters, removed_versions

# Rows kept for each tenant; a row takes about 300 bytes.
REMEMBERED = 10_000


async def remove_versions(
    connection: AsyncConnection, tenant_id: str, which: ColumnElement[bool], now: datetime
) -> None:
    """Move a tenant's versions to the removed ones. Those without content are deleted.

    The caller holds the lock of their name. which: a condition on `adapters` and `adapter_versions`.
    """
    removed = (
        select(
            adapters.c.tenant_id,
            adapter_versions.c.digest,
            adapters.c.name,
            func.max(adapter_versions.c.num_bytes).label("num_bytes"),
            func.max(adapter_versions.c.version).label("version"),
        )
        .join_from(adapters, adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
        .where(adapters.c.tenant_id == tenant_id, adapter_versions.c.digest != "", which)
        .group_by(adapters.c.tenant_id, adapter_versions.c.digest, adapters.c.name)
    )
    if rows := (await connection.execute(removed)).all():
        table, key = removed_versions, tuple_(removed_versions.c.digest, removed_versions.c.name)
        again = and_(table.c.tenant_id == tenant_id, key.in_([(row.digest, row.name) for row in rows]))
        earlier = (await connection.execute(select(table.c.digest, table.c.name, table.c.version).where(again))).all()
        # The newest number stays on record, because a name's numbers are never reused.
        newest = {(row.digest, row.name): row.version or 0 for row in earlier}
        await connection.execute(delete(table).where(again))
        values = [
            {**row._mapping, "removed_at": now, "version": max(row.version, newest.get((row.digest, row.name), 0))}
            for row in rows
        ]
        await connection.execute(insert(table), values)
    versions = select(adapter_versions.c.adapter_id, adapter_versions.c.version).join_from(
        adapters, adapter_versions, adapter_versions.c.adapter_id == adapters.c.id
    )
    gone = tuple_(adapter_versions.c.adapter_id, adapter_versions.c.version)
    await connection.execute(
        delete(adapter_versions).where(gone.in_(versions.where(adapters.c.tenant_id == tenant_id, which)))
    )


def all_versions(
    tenant_id: str | BindParameter[str],
    which: Callable[[ColumnElement[str], ColumnElement[str]], ColumnElement[bool]],
) -> Any:
    """Select (name, digest) of a tenant's versions, on record or removed, as a subquery.

    which: builds the condition from the columns of name and digest. It stands inside each part, where indexes help.
    """
    table = removed_versions
    on_record = (
        select(adapters.c.name, adapter_versions.c.digest)
        .join_from(adapters, adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
        .where(adapters.c.tenant_id == tenant_id, adapter_versions.c.digest != "")
        .where(which(adapters.c.name, adapter_versions.c.digest))
    )
    removed = select(table.c.name, table.c.digest).where(
        table.c.tenant_id == tenant_id, which(table.c.name, table.c.digest)
    )
    return union(on_record, removed).subquery()


async def uncollected(connection: AsyncConnection, tenant_id: str, besides: str) -> int:
    """Return the bytes of a tenant's removed contents that the store still keeps and no version on record has.

    besides: a digest to leave out.
    """
    table = removed_versions
    on_record = (
        select(adapter_versions.c.digest)
        .join_from(adapters, adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
        .where(adapters.c.tenant_id == tenant_id)
    )
    contents = (
        select(func.max(table.c.num_bytes).label("num_bytes"))
        .where(table.c.tenant_id == tenant_id, table.c.num_bytes > 0, table.c.digest != besides)
        .where(table.c.digest.not_in(on_record))
        .group_by(table.c.digest)
        .subquery()
    )
    return (await connection.execute(select(int_sum(contents.c.num_bytes)))).scalar_one()


async def removed_since(connection: AsyncConnection, digests: Sequence[str], moment: datetime) -> set[str]:
    """Return those of the digests that belong to versions removed after `moment`."""
    table = removed_versions
    query = select(table.c.digest).where(table.c.digest.in_(digests), table.c.removed_at > moment).distinct()
    return set((await connection.execute(query)).scalars())


async def settle_removed(database: Database, before: datetime) -> None:
    """Stop counting the bytes of versions removed before a given time. Call it after a collection.

    Deletes those that are not among the REMEMBERED last removed versions of their tenant.
    """
    table, old = removed_versions, removed_versions.c.removed_at <= before
    async with database.write() as connection:
        await connection.execute(update(table).where(old, table.c.num_bytes > 0).values(num_bytes=0))
        place = func.row_number().over(partition_by=table.c.tenant_id, order_by=table.c.removed_at.desc())
        ranked = select(table.c.tenant_id, table.c.digest, table.c.name, place.label("place")).subquery()
        beyond = select(ranked.c.tenant_id, ranked.c.digest, ranked.c.name).where(ranked.c.place > REMEMBERED)
        key = tuple_(table.c.tenant_id, table.c.digest, table.c.name)
        await connection.execute(delete(table).where(old, key.in_(beyond)))
