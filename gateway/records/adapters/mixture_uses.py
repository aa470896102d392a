"""Uses of adapters as parts of mixtures, found by the mixtures' names in the sums of usage."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, exists, func, literal, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.activity.tables import MIXTURES, MODEL, activity_series
from gateway.records.adapters.list_uses import KNOWN, RECENT, Use
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import adapters, usage_daily, usage_hourly


def has_part(model: ColumnElement[str], name: ColumnElement[str], dialect: str) -> ColumnElement[bool]:
    """Return the condition that `model` is the name of a mixture (`a*0.7+b*0.3`) with this adapter."""
    # LIKE would take `_` in a name for any character.
    position = func.instr if dialect == "sqlite" else func.strpos
    return position(literal("+") + model, literal("+") + name + literal("*")) > 0


def mixing_tenants() -> Select[Any]:
    """Select the ids of tenants that have used mixtures. Few do, and the others' sums need not be read."""
    # An alias, because the query around it may join the same table.
    series = activity_series.alias().c
    return select(series.tenant_id).where(series.kind == MODEL, series.name == MIXTURES)


def unmixed(now: datetime, days: int, dialect: str) -> ColumnElement[bool]:
    """Return the condition of adapters in no mixture of the last days, nor of the day in which they begin."""
    own = usage_daily.c
    which = (own.tenant_id == adapters.c.tenant_id, own.day > now - timedelta(days=days + 1))
    mixed = exists().where(*which, has_part(own.model, adapters.c.name, dialect)).correlate(adapters)
    return or_(adapters.c.tenant_id.not_in(mixing_tenants()), ~mixed)


async def uses_in_mixtures(
    connection: AsyncConnection, now: datetime, ids: Sequence[str]
) -> dict[tuple[str, str], Use]:
    """Return the uses of these adapters as parts of mixtures, by tenant and name."""
    parts = []
    for table, at, since in (
        (usage_hourly, usage_hourly.c["hour"], RECENT),
        (usage_daily, usage_daily.c["day"], KNOWN),
    ):
        requests = table.c.requests if table is usage_hourly else literal(0)
        named = has_part(table.c.model, adapters.c.name, connection.dialect.name)
        same = and_(table.c.tenant_id == adapters.c.tenant_id, at > now - since, named)
        part = select(adapters.c.tenant_id, adapters.c.name, requests.label("requests"), at.label("at"))
        part = part.join_from(adapters, table, same)
        parts.append(part.where(adapters.c.id.in_(ids), adapters.c.tenant_id.in_(mixing_tenants())))
    every = union_all(*parts).subquery()
    query = select(every.c.tenant_id, every.c.name, int_sum(every.c.requests), func.max(every.c.at))
    found = await connection.execute(query.group_by(every.c.tenant_id, every.c.name))
    return {(tenant_id, name): Use(requests, last) for tenant_id, name, requests, last in found}
