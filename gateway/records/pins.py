"""Versions that the operator pinned, of all tenants."""

from collections.abc import Sequence

from sqlalchemy import select

from gateway.records.adapter_rows import READY
from gateway.records.database import Database
from gateway.records.tables import adapter_versions
from wire.prefetch import MAX_PINNED


async def pinned_digests(database: Database) -> Sequence[str]:
    """Return the digests of the pinned versions that are served; at most MAX_PINNED. Raises Unavailable."""
    pinned = select(adapter_versions.c.digest).where(adapter_versions.c.pinned, adapter_versions.c.state == READY)
    async with database.read() as connection:
        rows = await connection.execute(pinned.distinct().order_by(adapter_versions.c.digest).limit(MAX_PINNED))
    return [row.digest for row in rows]
