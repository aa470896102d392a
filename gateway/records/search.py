"""Search by name, id or digest for tenants, adapter versions and keys."""

import re

import msgspec
from sqlalchemy import or_, select

from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions, adapters, api_keys, tenants
from wire.digests import bare_digest

# Matches of each kind.
MAX_FOUND = 20
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


class FoundVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Adapter, or one of its versions if a digest was searched for."""

    tenant: str
    name: str
    version: int | None = None
    digest: str | None = None


class FoundKey(msgspec.Struct, frozen=True, kw_only=True):
    """Key; tenant: None for an admin key."""

    id: str
    label: str
    tenant: str | None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Matches. An exact match is the only entry of its list."""

    tenants: list[str]
    versions: list[FoundVersion]
    keys: list[FoundKey]

    @property
    def number(self) -> int:
        return len(self.tenants) + len(self.versions) + len(self.keys)


class Search:
    """Queries of searches. They raise Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, text: str) -> Found:
        """Return tenants by name or display name, adapters by name, keys by id or label, and versions by digest."""
        like = f"%{text.replace('~', '~~').replace('%', '~%').replace('_', '~_')}%"
        texts = (tenants.c.name, tenants.c.display_name)
        names = select(tenants.c.name).where(or_(*(text.like(like, escape="~") for text in texts)))
        keys = (
            select(api_keys.c.id, api_keys.c.label, tenants.c.name.label("tenant"))
            .outerjoin(tenants, tenants.c.id == api_keys.c.tenant_id)
            .where(or_(api_keys.c.id == text, api_keys.c.label.like(like, escape="~")))
        )
        owned = select(tenants.c.name.label("tenant"), adapters.c.name).join(
            tenants, tenants.c.id == adapters.c.tenant_id
        )
        named = owned.where(adapters.c.name.like(like, escape="~"))
        digest = _DIGEST.fullmatch(bare_digest(text))
        versions = (
            owned.add_columns(adapter_versions.c.version, adapter_versions.c.digest)
            .join(adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
            .where(adapter_versions.c.digest.like(f"{digest[0] if digest else ''}%"))
        )
        async with self._database.read() as connection:
            of_tenants = (await connection.execute(names.order_by(tenants.c.name).limit(MAX_FOUND))).scalars()
            of_keys = await connection.execute(keys.order_by(api_keys.c.label, api_keys.c.id).limit(MAX_FOUND))
            query = (versions if digest else named).order_by(tenants.c.name, adapters.c.name).limit(MAX_FOUND)
            of_adapters = await connection.execute(query)
            found = Found(
                tenants=list(of_tenants),
                versions=[FoundVersion(**row._mapping) for row in of_adapters],
                keys=[FoundKey(**row._mapping) for row in of_keys],
            )
        exact = [name for name in found.tenants if name == text]
        return msgspec.structs.replace(found, tenants=exact or found.tenants)
