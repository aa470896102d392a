"""Audit log: the actor, time and origin of each change. An entry is written in the transaction of its change."""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, delete, func, insert, literal, not_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.caller import CALLER
from gateway.errors import BadRequest
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, audit

# Entries kept of a tenant's own changes. These are limited by rate, not by number: 60 a minute reach this in 14 hours,
# about 20 MB.
OWN_ENTRIES = 50_000
SWEPT_AT_ONCE = 1000


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A change.

    actor: the id of the key that made it, or the subject of the session. tenant: the owner of the changed records, by
    its name at that time; None for no single tenant. address, request_id: the HTTP request's; None without a request.
    detail: the new values. own: whether a key or session of the tenant made the change. before: the earlier values of
    the fields in `detail`; None if nothing was there before. actor_label: label of the actor's key at that time.
    session_id: id of the browser's session.
    """

    id: str
    at: datetime
    actor: str
    action: str
    target: str
    tenant: str | None
    address: str | None
    request_id: str | None
    detail: dict[str, Any]
    own: bool
    before: dict[str, Any] | None = None
    actor_label: str | None = None
    session_id: str | None = None


async def record_change(
    connection: AsyncConnection,
    actor: str,
    action: str,
    target: str,
    detail: dict[str, Any] | None = None,
    *,
    before: dict[str, Any] | None = None,
    tenant: str | None = None,
    own: bool = False,
) -> None:
    """Add an entry. action: "tenant.create" and the like. detail, before: new and earlier values, never a secret. own:
    see AuditEntry; by default it follows from the actor.
    """
    caller = CALLER.get()
    label = select(api_keys.c.label).where(api_keys.c.id == actor, api_keys.c.label != "")
    of_tenant = select(api_keys.c.id).where(api_keys.c.id == actor, api_keys.c.tenant_id.is_not(None))
    await connection.execute(
        insert(audit).values(
            id=uuid.uuid4().hex,
            at=datetime.now(UTC),
            actor=actor,
            action=action,
            target=target,
            tenant=tenant,
            address=None if caller is None else caller.address,
            request_id=None if caller is None else caller.request_id,
            detail=msgspec.json.encode(detail or {}).decode(),
            # A person who logged in without a key has no row among the keys.
            own=or_(of_tenant.exists(), literal(own or (caller is not None and caller.tenant_name is not None))),
            session_id=None if caller is None else caller.session_id,
            before=None if before is None else msgspec.json.encode(before).decode(),
            actor_label=label.scalar_subquery(),
        )
    )


class Audit:
    """The entries, and the removal of those of tenants' own changes. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(
        self,
        actor: str,
        action: str,
        target: str,
        detail: dict[str, Any],
        *,
        own: bool = False,
        tenant: str | None = None,
    ) -> None:
        """Add an entry for a change outside of the database, or for a failed log-in. Raises Unavailable."""
        async with self._database.write() as connection:
            await record_change(connection, actor, action, target, detail, own=own, tenant=tenant)

    async def list(
        self,
        *,
        tenant: str | None = None,
        actor: str | None = None,
        action: str | Sequence[str] | None = None,
        not_actions: Sequence[str] = (),
        since: datetime | None = None,
        until: datetime | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> tuple[list[AuditEntry], bool]:
        """Return entries, newest first, and whether there are more.

        action: "key.create", or "key" for all changes of keys; or several. not_actions: actions to leave out.
        after: the id of the previous page's last entry. Raises BadRequest if there is no such entry.
        """
        query = select(audit).order_by(audit.c.at.desc(), audit.c.id.desc()).limit(limit + 1)
        if tenant is not None:
            query = query.where(audit.c.tenant == tenant)
        if actor is not None:
            query = query.where(audit.c.actor == actor)
        if action is not None:
            query = query.where(or_(*map(_is_action, [action] if isinstance(action, str) else action)))
        for other in not_actions:
            query = query.where(not_(_is_action(other)))
        if since is not None:
            query = query.where(audit.c.at >= since)
        if until is not None:
            query = query.where(audit.c.at < until)
        async with self._database.read() as connection:
            if after is not None:
                last = (await connection.execute(select(audit.c.at, audit.c.id).where(audit.c.id == after))).first()
                if last is None:
                    raise BadRequest("after: there is no such entry.", param="after")
                # The first condition alone lets an index begin at the position.
                query = query.where(audit.c.at <= last.at, or_(audit.c.at < last.at, audit.c.id < last.id))
            rows = (await connection.execute(query)).all()
        return [_entry(row) for row in rows[:limit]], len(rows) > limit

    async def sweep(self, kept: timedelta) -> int:
        """Remove entries of tenants' own changes that are older than `kept` or beyond a tenant's newest OWN_ENTRIES.

        Operators' entries stay. Returns the number of removed entries.
        """
        removed = await self._remove(audit.c.at < datetime.now(UTC) - kept)
        own = select(audit.c.tenant).where(audit.c.own).group_by(audit.c.tenant).having(func.count() > OWN_ENTRIES)
        async with self._database.read() as connection:
            excessive = list((await connection.execute(own)).scalars())
        for tenant in excessive:
            newest = select(audit.c.at).where(audit.c.own, audit.c.tenant == tenant).order_by(audit.c.at.desc())
            async with self._database.read() as connection:
                oldest_kept = (await connection.execute(newest.offset(OWN_ENTRIES - 1).limit(1))).scalar_one_or_none()
            if oldest_kept is not None:
                removed += await self._remove(audit.c.tenant == tenant, audit.c.at < oldest_kept)
        return removed

    async def _remove(self, *which: ColumnElement[bool]) -> int:
        """Remove tenants' own entries, in short transactions, so that no other writer waits for long."""
        removed = 0
        some = select(audit.c.id).where(audit.c.own, *which).limit(SWEPT_AT_ONCE)
        while True:
            async with self._database.write() as connection:
                count = (await connection.execute(delete(audit).where(audit.c.id.in_(some)))).rowcount
            removed += count
            if count < SWEPT_AT_ONCE:
                return removed


def _is_action(action: str) -> ColumnElement[bool]:
    return or_(audit.c.action == action, audit.c.action.startswith(f"{action}.", autoescape=True))


def _entry(row: Row[Any]) -> AuditEntry:
    before = None if row.before is None else msgspec.json.decode(row.before)
    return AuditEntry(
        **{**row._mapping, "detail": msgspec.json.decode(row.detail), "own": bool(row.own), "before": before}
    )
