"""Removed keys of families: their usage still counts against the limits that their successors have.

The limits of a rotated key continue with its successor. If Redis loses them, they are backfilled from the usage of all
keys of the family, so a key that is removed stays on record here. A tenant's newest REMEMBERED rows stay.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Column, CompoundSelect, ForeignKey, Index, String, Table, delete, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.sql.schema import UtcDateTime, metadata
from gateway.records.sql.tables import api_keys

# Rows kept for each tenant: 13 rotations an hour fill them in the longest period of a budget. A row takes 150 bytes.
REMEMBERED = 10_000
# Most rows that one call removes; each call adds fewer.
MAX_FORGOTTEN = 1000

removed_keys = Table(
    "removed_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant_id", String(32), ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False),
    Column("family_id", String(32), nullable=False, index=True),
    Column("removed_at", UtcDateTime, nullable=False),
    Index("ix_removed_keys_tenant_id_removed_at", "tenant_id", "removed_at"),
)


async def remove_keys(connection: AsyncConnection, tenant_id: str, ids: Sequence[str], now: datetime) -> None:
    """Remove keys of a tenant and remember the successors among them; a family has the id of its first key."""
    own = api_keys.c
    successors = select(own.id, own.tenant_id, own.family_id, literal(now, UtcDateTime)).where(
        own.id.in_(ids), own.family_id != own.id
    )
    columns = ["id", "tenant_id", "family_id", "removed_at"]
    await connection.execute(insert(removed_keys).from_select(columns, successors))
    await connection.execute(delete(api_keys).where(own.id.in_(ids)))
    known = removed_keys.c
    newest = select(known.id).where(known.tenant_id == tenant_id).order_by(known.removed_at.desc(), known.id)
    oldest = list((await connection.execute(newest.offset(REMEMBERED).limit(MAX_FORGOTTEN))).scalars())
    if oldest:
        await connection.execute(delete(removed_keys).where(known.id.in_(oldest)))


def successors_of(family: str) -> CompoundSelect[tuple[str]]:
    """Select the ids of a family's keys, present and removed. The first key may be missing: its id is the family's."""
    present = select(api_keys.c.id).where(api_keys.c.family_id == family)
    return present.union_all(select(removed_keys.c.id).where(removed_keys.c.family_id == family))
