"""Keys that expire soon and have no successor."""

from datetime import datetime

import msgspec
from sqlalchemy import Subquery, func, select

from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, tenants

# Maximum keys in one list for events. The others follow in later lists, once these have expired.
MAX_KEYS = 1000


class ExpiringKey(msgspec.Struct, frozen=True):
    """A key. tenant_id, tenant: None for an admin's key. more: the tenant's further keys that expire in the period."""

    id: str
    label: str
    expires_at: datetime
    tenant_id: str | None
    tenant: str | None
    more: int = 0


async def expiring_keys(
    database: Database,
    now: datetime,
    until: datetime,
    limit: int = MAX_KEYS,
    *,
    made_before: datetime | None = None,
    one_each: bool = False,
) -> list[ExpiringKey]:
    """Return valid keys that expire before `until`, `limit` at most. Raises Unavailable.

    Admins' keys and the soonest key of each tenant come first, then the tenants' second keys, and so on, so that one
    tenant cannot fill the list. made_before: leave out newer keys. one_each: leave out all but a tenant's soonest key.
    A key that a rotation has replaced is left out, because it is meant to expire.
    """
    found = _found(now, until, made_before)
    query = (
        select(*(found.c[name] for name in ExpiringKey.__struct_fields__))
        .where(*([found.c.number == 1] if one_each else []))
        .order_by(found.c.number, found.c.expires_at, found.c.id)
        .limit(limit)
    )
    async with database.read() as connection:
        return [ExpiringKey(*row) for row in (await connection.execute(query)).all()]


async def count_expiring_owners(
    database: Database, now: datetime, until: datetime, *, made_before: datetime | None = None
) -> int:
    """Return the number of keys that `expiring_keys` would return with `one_each` and no limit. Raises Unavailable."""
    found = _found(now, until, made_before)
    query = select(func.count()).select_from(found).where(found.c.number == 1)
    async with database.read() as connection:
        return int((await connection.execute(query)).scalar_one())


def _found(now: datetime, until: datetime, made_before: datetime | None) -> Subquery:
    """Select the keys, each with its number in the order of its owner's keys."""
    other, keys = api_keys.alias("other"), api_keys.c
    family = func.coalesce(keys.family_id, keys.id)
    successor = select(other.c.id).where(
        # Both sides have an index, unlike `coalesce`.
        (other.c.family_id == family) | (other.c.family_id.is_(None) & (other.c.id == family)),
        other.c.id != keys.id,
        other.c.revoked_at.is_(None),
        other.c.expires_at.is_(None) | (other.c.expires_at > keys.expires_at),
    )
    # Admins' keys have no owner, so each counts as its own.
    owner = func.coalesce(keys.tenant_id, keys.id)
    number = func.row_number().over(partition_by=owner, order_by=(keys.expires_at, keys.id))
    more = func.count().over(partition_by=owner) - 1
    return (
        select(keys.id, keys.label, keys.expires_at, keys.tenant_id, tenants.c.name.label("tenant"))
        .add_columns(more.label("more"), number.label("number"))
        .select_from(api_keys.outerjoin(tenants, tenants.c.id == keys.tenant_id))
        .where(keys.revoked_at.is_(None), keys.expires_at > now, keys.expires_at <= until)
        .where(~successor.exists(), *([] if made_before is None else [keys.created_at < made_before]))
        .subquery()
    )
