"""Names of adapters by digest, which show operators whose versions an engine holds."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import select

from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions, adapters, tenants

# Digests of one query, and names of one digest that are shown.
PAGE, MAX_NAMES = 500, 4


class Residency:
    """Query of names. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def names(self, digests: Iterable[str]) -> Mapping[str, Sequence[str]]:
        """Return the versions with these contents as `tenant/name@version`, the newest first."""
        wanted = list(digests)
        found: defaultdict[str, list[str]] = defaultdict(list)
        versions = adapter_versions.c
        query = (
            select(versions.digest, tenants.c.name, adapters.c.name, versions.version)
            .join(adapters, adapters.c.id == versions.adapter_id)
            .join(tenants, tenants.c.id == adapters.c.tenant_id)
            .order_by(versions.created_at.desc())
        )
        async with self._database.read() as connection:
            for first in range(0, len(wanted), PAGE):
                some = query.where(versions.digest.in_(wanted[first : first + PAGE]))
                for digest, tenant, name, version in await connection.execute(some):
                    if len(found[digest]) < MAX_NAMES:
                        found[digest].append(f"{tenant}/{name}@{version}")
        return found
