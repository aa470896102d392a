"""Versions that the operator pinned, of all tenants."""

from collections.abc import Collection, Mapping

from sqlalchemy import and_, select

from gateway.records.bases.base import Binding
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_probes, adapter_versions
from gateway.records.version_state import READY
from wire.prefetch import MAX_PINNED


async def pinned_bases(database: Database) -> Mapping[str, Collection[Binding]]:
    """Return the digests of the pinned versions that are served, each with the engines on which its versions may run.

    There are at most MAX_PINNED digests. Raises Unavailable.
    """
    version, probe = adapter_versions, adapter_probes
    joined = version.outerjoin(
        probe, and_(probe.c.adapter_id == version.c.adapter_id, probe.c.version == version.c.version)
    )
    pinned = (
        select(version.c.digest, version.c.base_id, probe.c.base_digest)
        .select_from(joined)
        .where(version.c.pinned, version.c.state == READY)
        .distinct()
        .order_by(version.c.digest, version.c.base_id, probe.c.base_digest)
        .limit(MAX_PINNED)
    )
    bases: dict[str, list[Binding]] = {}
    async with database.read() as connection:
        for row in await connection.execute(pinned):
            bases.setdefault(row.digest, []).append(Binding.of(row.base_id, row.base_digest))
    return bases
