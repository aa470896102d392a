"""Keys that expire soon and have no successor."""

from datetime import datetime

import msgspec
from sqlalchemy import func, select

from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, tenants

# Maximum keys in one list for events. The others follow in later lists, once these have expired.
MAX_KEYS = 1000


class ExpiringKey(msgspec.Struct, frozen=True):
    """A key. tenant_id, tenant: None for an admin's key."""

    id: str
    label: str
    expires_at: datetime
    tenant_id: str | None
    tenant: str | None


async def expiring_keys(
    database: Database, now: datetime, until: datetime, limit: int = MAX_KEYS, *, made_before: datetime | None = None
) -> list[ExpiringKey]:
    """Return valid keys that expire before `until`, the soonest first, `limit` at most. Raises Unavailable.

    made_before: leave out newer keys. A key that a rotation has replaced is left out: it is meant to expire.
    """
    other = api_keys.alias("other")
    family = func.coalesce(api_keys.c.family_id, api_keys.c.id)
    successor = select(other.c.id).where(
        # Both sides have an index, unlike `coalesce`.
        (other.c.family_id == family) | (other.c.family_id.is_(None) & (other.c.id == family)),
        other.c.id != api_keys.c.id,
        other.c.revoked_at.is_(None),
        other.c.expires_at.is_(None) | (other.c.expires_at > api_keys.c.expires_at),
    )
    owned = api_keys.outerjoin(tenants, tenants.c.id == api_keys.c.tenant_id)
    query = (
        select(api_keys.c.id, api_keys.c.label, api_keys.c.expires_at, api_keys.c.tenant_id, tenants.c.name)
        .select_from(owned)
        .where(api_keys.c.revoked_at.is_(None), api_keys.c.expires_at > now, api_keys.c.expires_at <= until)
        .where(~successor.exists(), *([] if made_before is None else [api_keys.c.created_at < made_before]))
        .order_by(api_keys.c.expires_at, api_keys.c.id)
        .limit(limit)
    )
    async with database.read() as connection:
        return [ExpiringKey(*row) for row in (await connection.execute(query)).all()]
