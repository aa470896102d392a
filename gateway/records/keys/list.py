"""List of all keys: filters, order and pages."""

from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import ColumnElement, and_, func, or_, select

from gateway.records.cooperative_rows import read_rows
from gateway.records.keys.keys import KEYS, ApiKey, read_key
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, tenants

State = Literal["valid", "never_used", "expiring", "expired", "revoked"]
STATES: tuple[State, ...] = get_args(State)
Sort = Literal["tenant", "label", "created_at", "expires_at", "last_used_at"]
SORTS: tuple[Sort, ...] = get_args(Sort)
# A key counts as expiring this long before its end.
EXPIRING = timedelta(days=7)
MAX_PAGE = 1000


class KeyFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of keys; None: any. tenant: its name; "" for admin keys. q: part of the label, or the id's beginning."""

    tenant: str | None = None
    state: State | None = None
    q: str | None = None


class KeyLists:
    """Queries of keys. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self,
        criteria: KeyFilter,
        *,
        sort: Sort = "created_at",
        descending: bool = False,
        limit: int = 50,
        offset: int = 0,
    ) -> tuple[list[ApiKey], int]:
        """Return a page of the matching keys, and their number. Keys without the sort's value come last."""
        conditions = _conditions(criteria, datetime.now(UTC))
        order = tenants.c.name if sort == "tenant" else api_keys.c[sort]
        found = KEYS.where(*conditions).order_by(order.is_(None), order.desc() if descending else order, api_keys.c.id)
        counted = select(func.count()).select_from(api_keys.outerjoin(tenants)).where(*conditions)
        async with self._database.read() as connection:
            keys = await read_rows(connection, found.limit(limit).offset(offset), read_key)
            total = (await connection.execute(counted)).scalar_one()
        return keys, total


def key_state(key: ApiKey, now: datetime) -> State:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired"
    if key.expires_at is not None and key.expires_at <= now + EXPIRING:
        return "expiring"
    return "never_used" if key.last_used_at is None else "valid"


def _conditions(criteria: KeyFilter, now: datetime) -> list[ColumnElement[bool]]:
    keys: Any = api_keys.c
    conditions: list[ColumnElement[bool]] = []
    if criteria.tenant is not None:
        conditions.append(tenants.c.name == criteria.tenant if criteria.tenant else keys.tenant_id.is_(None))
    if criteria.q:
        starts = keys.id.startswith(criteria.q.lower(), autoescape=True)
        conditions.append(or_(func.lower(keys.label).contains(criteria.q.lower(), autoescape=True), starts))
    lives = and_(keys.revoked_at.is_(None), or_(keys.expires_at.is_(None), keys.expires_at > now))
    if criteria.state is not None:
        of_state: dict[State, ColumnElement[bool]] = {
            "valid": lives,
            "never_used": and_(lives, keys.last_used_at.is_(None)),
            "expiring": and_(lives, keys.expires_at <= now + EXPIRING),
            "expired": and_(keys.revoked_at.is_(None), keys.expires_at <= now),
            "revoked": keys.revoked_at.is_not(None),
        }
        conditions.append(of_state[criteria.state])
    return conditions
