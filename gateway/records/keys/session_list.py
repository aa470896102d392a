"""List of the sessions of browsers that have not ended: filters, order and pages."""

from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import ColumnElement, func, or_, select

from gateway.errors import RecordNotFound
from gateway.records.keys.session_table import sessions
from gateway.records.keys.sessions import SESSION_ID
from gateway.records.sql.database import Database
from gateway.records.sql.tables import tenants

Sort = Literal["label", "role", "tenant", "created_at", "last_used_at", "expires_at"]
SORTS: tuple[Sort, ...] = get_args(Sort)


class SessionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of sessions; None: any. tenant: its name. q: part of the person's name, or the subject's beginning."""

    tenant: str | None = None
    q: str | None = None


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session, without the token's hash. role: role at log-in. tenant: None for operators."""

    id: str
    subject: str
    label: str
    role: str
    tenant: str | None
    address: str | None
    created_at: datetime
    last_used_at: datetime
    expires_at: datetime


class SessionLists:
    """Queries of sessions. idle: time without use after which a session ends. Raises Unavailable."""

    def __init__(self, database: Database, idle: timedelta) -> None:
        self._database = database
        self._idle = idle

    async def page(
        self,
        criteria: SessionFilter,
        *,
        sort: Sort = "last_used_at",
        descending: bool = False,
        limit: int = 50,
        offset: int = 0,
    ) -> tuple[list[SessionRow], int]:
        """Return a page of the matching sessions, and the number of all. Those without the sort's value come last."""
        now = datetime.now(UTC)
        conditions: list[ColumnElement[bool]] = [
            sessions.c.expires_at > now,
            sessions.c.last_used_at > now - self._idle,
        ]
        if criteria.tenant:
            conditions.append(tenants.c.name == criteria.tenant)
        if criteria.q:
            label = func.lower(sessions.c.label).contains(criteria.q.lower(), autoescape=True)
            conditions.append(or_(label, sessions.c.subject.startswith(criteria.q, autoescape=True)))
        order = tenants.c.name if sort == "tenant" else sessions.c[sort]
        found = _QUERY.where(*conditions).order_by(
            order.is_(None), order.desc() if descending else order, sessions.c.id
        )
        counted = select(func.count()).select_from(_JOINED).where(*conditions)
        async with self._database.read() as connection:
            rows = (await connection.execute(found.limit(limit).offset(offset))).all()
            total = (await connection.execute(counted)).scalar_one()
        return [SessionRow(**row._mapping) for row in rows], total

    async def get(self, session_id: str) -> SessionRow:
        """Return a session. Raises RecordNotFound."""
        row = None
        if SESSION_ID.fullmatch(session_id):
            async with self._database.read() as connection:
                row = (await connection.execute(_QUERY.where(sessions.c.id == session_id))).one_or_none()
        if row is None:
            raise RecordNotFound("There is no session with this id.", param="id")
        return SessionRow(**row._mapping)


_JOINED: Any = sessions.outerjoin(tenants, tenants.c.id == sessions.c.tenant_id)
_OWN = tuple(name for name in SessionRow.__struct_fields__ if name != "tenant")
_QUERY = select(*(sessions.c[name] for name in _OWN), tenants.c.name.label("tenant")).select_from(_JOINED)
