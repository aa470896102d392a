"""Events for operators and tenants, and the outbox of their deliveries.

An event and its deliveries are written in one transaction, so a crash loses neither. The unique column `once`
keeps an event from being recorded twice by several gateways.
"""

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import msgspec
from sqlalchemy import ColumnElement, Row, and_, delete, func, literal, or_, select
from sqlalchemy.dialects.postgresql import insert as insert_on_postgresql
from sqlalchemy.dialects.sqlite import insert as insert_on_sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest
from gateway.records.events.tables import event_deliveries, events, webhooks
from gateway.records.events.types import EventType
from gateway.records.sql.database import Database

EVENT_TYPES: tuple[str, ...] = get_args(EventType)
KEPT = timedelta(days=90)
# Maximum events per type, tenant and hour. Further ones are dropped, so that a tenant cannot fill the table.
MAX_PER_HOUR = 20
SWEPT_AT_ONCE, LOOKED_UP_AT_ONCE = 1000, 500
_INSERT: Mapping[str, Any] = {"postgresql": insert_on_postgresql, "sqlite": insert_on_sqlite}


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event. tenant: its name at that time; None for an event of no tenant. deliveries: webhook's name -> state."""

    id: str
    type: str
    tenant: str | None
    data: dict[str, Any]
    created_at: datetime
    deliveries: dict[str, str] = {}


async def record_event(
    connection: AsyncConnection,
    kind: EventType,
    data: Mapping[str, Any],
    *,
    once: str | None = None,
    tenant_id: str | None = None,
    tenant: str | None = None,
) -> bool:
    """Add an event and its deliveries, unless an event with the same `once` exists. Return whether it was added.

    once: None for an event that a single transaction causes. data: never a secret or a prompt.
    """
    now, event_id = datetime.now(UTC), uuid.uuid4().hex
    if tenant_id is not None:
        recent = select(func.count()).where(
            events.c.type == kind, events.c.tenant_id == tenant_id, events.c.created_at > now - timedelta(hours=1)
        )
        if (await connection.execute(recent)).scalar_one() >= MAX_PER_HOUR:
            return False
    row: dict[str, Any] = {
        "id": event_id,
        "once": once or event_id,
        "type": kind,
        "tenant_id": tenant_id,
        "tenant": tenant,
    }
    row |= {"data": msgspec.json.encode(data).decode(), "created_at": now}
    insert = _INSERT[connection.dialect.name]
    added = await connection.execute(insert(events).values(**row).on_conflict_do_nothing(index_elements=["once"]))
    if added.rowcount == 0:
        return False
    hears = or_(webhooks.c.types == "*", webhooks.c.types.contains(f",{kind},", autoescape=True))
    of_tenant: ColumnElement[bool] = webhooks.c.tenant_id.is_(None)
    if tenant_id is not None:
        of_tenant = or_(of_tenant, webhooks.c.tenant_id == tenant_id)
    columns = [event_deliveries.c[name] for name in ("event_id", "webhook_id", "state", "attempts", "created_at")]
    values = select(
        literal(event_id), webhooks.c.id, literal("pending"), literal(0), literal(now, events.c.created_at.type)
    )
    await connection.execute(insert(event_deliveries).from_select(columns, values.where(hears, of_tenant)))
    return True


class Events:
    """The table of events. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self.database = self._database = database

    async def record(
        self,
        kind: EventType,
        data: Mapping[str, Any],
        *,
        once: str,
        tenant_id: str | None = None,
        tenant: str | None = None,
    ) -> bool:
        """Add an event as `record_event` does, in a transaction of its own.

        If the event exists, the usual case, this takes no write lock.
        """
        async with self._database.read() as connection:
            if (await connection.execute(select(events.c.id).where(events.c.once == once))).first() is not None:
                return False
        async with self._database.write() as connection:
            return await record_event(connection, kind, data, once=once, tenant_id=tenant_id, tenant=tenant)

    async def missing(self, onces: Sequence[str]) -> set[str]:
        """Return the given values of `once` that no event has yet."""
        found: set[str] = set()
        for start in range(0, len(onces), LOOKED_UP_AT_ONCE):
            query = select(events.c.once).where(events.c.once.in_(onces[start : start + LOOKED_UP_AT_ONCE]))
            async with self._database.read() as connection:
                found.update((await connection.execute(query)).scalars())
        return set(onces) - found

    async def newest(self, kinds: tuple[EventType, ...]) -> dict[str, Event]:
        """Return the newest event of these types for each `engine` in their data. There are few such events."""
        query = select(events).where(events.c.type.in_(kinds)).order_by(events.c.created_at, events.c.id)
        async with self._database.read() as connection:
            found = [_event(row, {}) for row in (await connection.execute(query)).all()]
        return {event.data["engine"]: event for event in found}

    async def list(
        self,
        *,
        tenant: str | None = None,
        kind: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> tuple[list[Event], bool]:
        """Return events, newest first, and whether there are more. Raises BadRequest if `after` does not exist."""
        query = select(events).order_by(events.c.created_at.desc(), events.c.id.desc()).limit(limit + 1)
        if tenant is not None:
            query = query.where(events.c.tenant == tenant)
        if kind is not None:
            query = query.where(or_(events.c.type == kind, events.c.type.startswith(f"{kind}.", autoescape=True)))
        if since is not None:
            query = query.where(events.c.created_at >= since)
        if until is not None:
            query = query.where(events.c.created_at < until)
        async with self._database.read() as connection:
            if after is not None:
                last = (await connection.execute(select(events).where(events.c.id == after))).first()
                if last is None:
                    raise BadRequest("after: there is no such event.", param="after")
                same = and_(events.c.created_at == last.created_at, events.c.id < last.id)
                query = query.where(or_(events.c.created_at < last.created_at, same))
            rows = (await connection.execute(query)).all()
            of = select(event_deliveries.c.event_id, webhooks.c.name, event_deliveries.c.state)
            of = of.join(webhooks, webhooks.c.id == event_deliveries.c.webhook_id)
            of = of.where(event_deliveries.c.event_id.in_([row.id for row in rows])).order_by(webhooks.c.name)
            deliveries: dict[str, dict[str, str]] = {}
            for delivery in (await connection.execute(of)).all():
                deliveries.setdefault(delivery.event_id, {})[delivery.name] = delivery.state
        return [_event(row, deliveries.get(row.id, {})) for row in rows[:limit]], len(rows) > limit

    async def sweep(self) -> int:
        """Remove events older than KEPT, with their deliveries. Return their number."""
        removed = 0
        some = select(events.c.id).where(events.c.created_at < datetime.now(UTC) - KEPT).limit(SWEPT_AT_ONCE)
        while True:
            async with self._database.write() as connection:
                count = (await connection.execute(delete(events).where(events.c.id.in_(some)))).rowcount
            removed += count
            if count < SWEPT_AT_ONCE:
                return removed


def _event(row: Row[Any], deliveries: dict[str, str]) -> Event:
    return Event(
        id=row.id,
        type=row.type,
        tenant=row.tenant,
        data=msgspec.json.decode(row.data),
        created_at=row.created_at,
        deliveries=deliveries,
    )
