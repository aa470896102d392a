"""Who changed what, when and from where. A row is written in the same transaction as the change it tells of."""

import uuid
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, and_, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.caller import CALLER
from gateway.errors import BadRequest
from gateway.records.database import Database
from gateway.records.tables import api_keys, audit


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A change. actor: the id of the key that asked. tenant: the owner of the changed things, by the name it had; None:
    no single tenant. address, request_id: of the HTTP request; None where there was none. own: by the tenant's own key.
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


async def record_change(
    connection: AsyncConnection,
    actor: str,
    action: str,
    target: str,
    detail: dict[str, Any] | None = None,
    *,
    tenant: str | None = None,
) -> None:
    """Add an entry. action: "tenant.create" and the like. detail: never a secret."""
    caller = CALLER.get()
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
            own=of_tenant.exists(),
        )
    )


class Audit:
    """Reads what was written. Raises Unavailable when the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(
        self,
        *,
        tenant: str | None = None,
        actor: str | None = None,
        action: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> tuple[list[AuditEntry], bool]:
        """The newest first, and whether there are more. action: "key.create", or "key" for all that is done to keys.
        after: the id of the last entry that is known already. Raises BadRequest if it is none."""
        query = select(audit).order_by(audit.c.at.desc(), audit.c.id.desc()).limit(limit + 1)
        if tenant is not None:
            query = query.where(audit.c.tenant == tenant)
        if actor is not None:
            query = query.where(audit.c.actor == actor)
        if action is not None:
            query = query.where(or_(audit.c.action == action, audit.c.action.startswith(f"{action}.", autoescape=True)))
        if since is not None:
            query = query.where(audit.c.at >= since)
        if until is not None:
            query = query.where(audit.c.at < until)
        async with self._database.read() as connection:
            if after is not None:
                last = (await connection.execute(select(audit.c.at, audit.c.id).where(audit.c.id == after))).first()
                if last is None:
                    raise BadRequest("after: there is no such entry.", param="after")
                query = query.where(or_(audit.c.at < last.at, and_(audit.c.at == last.at, audit.c.id < last.id)))
            rows = (await connection.execute(query)).all()
        return [_entry(row) for row in rows[:limit]], len(rows) > limit


def _entry(row: Row[Any]) -> AuditEntry:
    return AuditEntry(**{**row._mapping, "detail": msgspec.json.decode(row.detail), "own": bool(row.own)})
