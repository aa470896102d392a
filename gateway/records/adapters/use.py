"""Users of one adapter in the last day: keys, end users and versions; and the changes of the adapter."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import (
    CompoundSelect,
    Row,
    String,
    Subquery,
    and_,
    cast,
    func,
    literal_column,
    or_,
    select,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.requests.rows_of_owner import in_order, owned
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import api_keys, audit, usage, usage_hourly
from gateway.records.tenants.tenants import Tenant

# Maximum of a tenant's newest rows read for end users and versions, and of its newest audit entries read for changes.
SCANNED = 20_000
DAY = timedelta(days=1)
MAX_USERS, MAX_CHANGES = 20, 50
# Kinds of rows of `_newest_uses`.
USERS, VERSIONS = range(2)
SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")


class Use(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests of a key, an end user or a version, or of all. name: the key's label, the end user, or the number."""

    name: str
    id: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0


class AdapterUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of an adapter within the last day, the most requests first.

    is_partial: whether users and versions leave out requests beyond the tenant's SCANNED newest.
    """

    keys: list[Use]
    users: list[Use]
    versions: list[Use]
    is_partial: bool


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the adapter. actor: the id of a key or person. actor_label: the key's label."""

    at: datetime
    actor: str
    actor_label: str | None
    action: str
    target: str
    detail: dict[str, Any]


# Actor of an operator's change as a tenant sees it.
OPERATOR = "operator"


class AdapterUses:
    """Queries of the use of an adapter. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, tenant: Tenant, name: str) -> AdapterUse:
        """Return the use of a tenant's adapter."""
        now = datetime.now(UTC)
        async with self._database.read() as connection:
            keys = await _keys(connection, tenant.id, name, now - DAY)
            dialect, at = connection.dialect.name, usage.c.created_at
            within = owned(dialect, usage.c.tenant_id, tenant.id, at, now - DAY)
            index = (usage.c.tenant_id.desc(), at.desc())
            oldest = select(at).where(*within).order_by(*index)
            horizon = (await connection.execute(oldest.offset(SCANNED - 1).limit(1))).scalar_one_or_none()
            if horizon is not None:
                within = owned(dialect, usage.c.tenant_id, tenant.id, at, horizon)
            columns = (usage.c[each] for each in ("model", "end_user", "version", *SUMS[1:]))
            # Further rows may have the time of the horizon.
            read = in_order(dialect, select(*columns).where(*within), index, 2 * SCANNED)
            found = (await connection.execute(_newest_uses(read, name))).all()
        users, versions = ([row for row in found if row.kind == kind] for kind in (USERS, VERSIONS))
        return AdapterUse(
            keys=keys,
            users=sorted(map(_use, users), key=lambda use: (-use.requests, use.name)),
            versions=sorted(map(_use, versions), key=lambda use: (-use.requests, int(use.name))),
            is_partial=horizon is not None,
        )

    async def changes(self, tenant: Tenant, name: str, *, by_tenant: bool = False) -> list[Change]:
        """Return the last changes of a tenant's adapter, its versions and aliases, newest first.

        by_tenant: the tenant itself asks; it sees operators as OPERATOR, without their keys.
        """
        target = f"{tenant.name}/{name}"
        async with self._database.read() as connection:
            # An earlier tenant of the same name may have had an adapter of this name.
            within = owned(connection.dialect.name, audit.c.tenant, tenant.name, audit.c.at, tenant.created_at)
            index = (audit.c.tenant.desc(), audit.c.at.desc())
            newest = select(audit).where(*within).order_by(*index).limit(SCANNED).subquery()
            marked = (newest.c.target.startswith(target + mark, autoescape=True) for mark in "@:")
            own = and_(or_(newest.c.target == target, *marked), newest.c.action.startswith("adapter."))
            order = (newest.c.tenant.desc(), newest.c.at.desc())
            rows = (await connection.execute(select(newest).where(own).order_by(*order).limit(MAX_CHANGES))).all()
        return [
            Change(
                at=row.at,
                actor=OPERATOR if by_tenant and not row.own else row.actor,
                actor_label=None if by_tenant and not row.own else row.actor_label,
                action=row.action,
                target=row.target,
                detail=msgspec.json.decode(row.detail),
            )
            for row in rows
        ]


async def _keys(connection: AsyncConnection, tenant_id: str, name: str, since: datetime) -> list[Use]:
    hours = usage_hourly
    which = and_(hours.c.tenant_id == tenant_id, hours.c.model == name, hours.c.hour > since)
    sums = (int_sum(hours.c[each]).label(each) for each in SUMS)
    query = (
        select(hours.c.key_id, api_keys.c.label, *sums)
        .join_from(hours, api_keys, api_keys.c.id == hours.c.key_id, isouter=True)
        .where(which)
        .group_by(hours.c.key_id, api_keys.c.label)
        .order_by(func.sum(hours.c.requests).desc(), hours.c.key_id)
        .limit(MAX_USERS)
    )
    rows = (await connection.execute(query)).all()
    return [Use(name=row.label or "", id=row.key_id, **_sums(row)) for row in rows]


def _newest_uses(read: Subquery, name: str) -> CompoundSelect[Any]:
    """Select the requests of an adapter by end user and by version, without NULL, among a tenant's newest rows.

    A single statement reads the rows only once.
    """
    newest = select(read).where(read.c.model == name).cte("newest")
    parts = []
    for kind, column in ((USERS, newest.c.end_user), (VERSIONS, newest.c.version)):
        sums = [func.count().label("requests"), *(int_sum(newest.c[each]).label(each) for each in SUMS[1:])]
        query = select(column.label("value"), *sums).where(column.is_not(None)).group_by(column)
        first = query.order_by(func.count().desc(), column).limit(MAX_USERS).subquery()
        values = (cast(first.c.value, String).label("value"), *(first.c[each] for each in SUMS))
        parts.append(select(literal_column(str(kind)).label("kind"), *values))
    return union_all(*parts)


def _use(row: Row[Any]) -> Use:
    return Use(name=row.value, **_sums(row))


def _sums(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in SUMS}
