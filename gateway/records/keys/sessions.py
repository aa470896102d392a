"""Sessions of browsers in the database. A session's token is stored only as a keyed hash."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import Row, Select, bindparam, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import RecordNotFound
from gateway.records.audit import record_change
from gateway.records.caches.changes import OPERATORS, count_change
from gateway.records.keys.session_table import sessions
from gateway.records.sql.database import Database
from gateway.records.sql.name_locks import lock_creation
from gateway.records.sql.tables import tenants
from gateway.records.tenants.tenants import Tenant, read_tenant

SESSION_ID = re.compile(r"[0-9a-f]{16}")
# Sessions of one key or person; a further log-in ends the oldest.
MAX_OF_SUBJECT = 10
SWEPT_AT_ONCE = 1000


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A stored session.

    subject: the actor of its changes: a key's id, or `oidc:` and the provider's subject. label: a name for people.
    role: role at log-in; the present role of a session with a key follows from the key. tenant: None for operators.
    key_id: the key that opened it, in the database; None otherwise. proof: for a session without such a key, digest
    of the settings that it relies on; the session ends when they change. address: the client's at log-in.
    """

    id: str
    token_hash: str
    subject: str
    label: str
    role: str
    tenant: Tenant | None
    key_id: str | None = None
    proof: str | None = None
    address: str | None = None
    created_at: datetime
    last_used_at: datetime
    expires_at: datetime

    @property
    def scope(self) -> str:
        """Return the scope of the change counter that the session depends on."""
        return OPERATORS if self.tenant is None else self.tenant.id

    def is_over(self, now: datetime, idle: timedelta) -> bool:
        return now >= self.expires_at or now - self.last_used_at >= idle


class SessionRecords:
    """The table of sessions. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, session: Session) -> None:
        """Store a session. Ends the subject's oldest ones beyond MAX_OF_SUBJECT, in whatever scope they are."""
        values = msgspec.structs.asdict(session)
        tenant = values.pop("tenant")
        owner = None if tenant is None else tenant.name
        async with self._database.write() as connection:
            # Two log-ins at once would not see each other's session.
            await lock_creation(connection, "sessions", session.subject)
            await connection.execute(insert(sessions).values(**values, tenant_id=tenant and tenant.id))
            own = select(sessions.c.id, sessions.c.tenant_id).where(sessions.c.subject == session.subject)
            newest = (
                own.order_by(sessions.c.created_at.desc(), sessions.c.id).offset(MAX_OF_SUBJECT).limit(SWEPT_AT_ONCE)
            )
            oldest = (await connection.execute(newest)).all()
            if oldest:
                await connection.execute(delete(sessions).where(sessions.c.id.in_([row.id for row in oldest])))
            detail = {"role": session.role, "label": session.label}
            await record_change(connection, session.subject, "session.open", session.id, detail, tenant=owner)
            if oldest:
                # The ended ones may be of other scopes: a person may have roles of operators and of several tenants.
                await count_change(connection, *(row.tenant_id for row in oldest))

    async def find(self, token_hash: str) -> Session | None:
        """Return the session of a token, over or not; None if there is none."""
        async with self._database.read() as connection:
            row = (await connection.execute(SESSIONS.where(sessions.c.token_hash == token_hash))).one_or_none()
        return None if row is None else read_session(row)

    async def list(self, limit: int, tenant_id: str | None = None) -> Sequence[Session]:
        """Return the newest sessions of everyone, or of a tenant."""
        query = SESSIONS.order_by(sessions.c.created_at.desc(), sessions.c.id).limit(limit)
        if tenant_id is not None:
            query = query.where(sessions.c.tenant_id == tenant_id)
        async with self._database.read() as connection:
            return [read_session(row) for row in (await connection.execute(query)).all()]

    async def remove(self, session_id: str, actor: str, action: str) -> None:
        """End a session. action: name of the audit entry's action. Raises RecordNotFound."""
        async with self._database.write() as connection:
            session = await _locked(connection, session_id)
            await connection.execute(delete(sessions).where(sessions.c.id == session_id))
            owner = None if session.tenant is None else session.tenant.name
            detail = {"subject": session.subject, "label": session.label}
            await record_change(connection, actor, action, session_id, detail, tenant=owner)
            await count_change(connection, session.scope)

    async def touch(self, used: Mapping[str, datetime]) -> None:
        """Store the times of the sessions' last uses, by id. An older time never replaces a newer one."""
        statement = (
            update(sessions)
            .where(sessions.c.id == bindparam("session"), sessions.c.last_used_at < bindparam("at"))
            .values(last_used_at=bindparam("at"))
        )
        rows = [{"session": session_id, "at": used[session_id]} for session_id in sorted(used)]
        async with self._database.write() as connection:
            await connection.execute(statement, rows)

    async def sweep(self, idle: timedelta) -> int:
        """Remove sessions that are over. Returns their number."""
        now = datetime.now(UTC)
        is_over = (sessions.c.expires_at <= now) | (sessions.c.last_used_at <= now - idle)
        async with self._database.write() as connection:
            return (await connection.execute(delete(sessions).where(is_over))).rowcount


# Sessions with their tenants.
SESSIONS: Select[Any] = select(
    *(column.label(f"session_{column.name}") for column in sessions.c if column.name != "tenant_id"), tenants
).join_from(sessions, tenants, isouter=True)


async def _locked(connection: AsyncConnection, session_id: str) -> Session:
    found = None
    if SESSION_ID.fullmatch(session_id):
        query = SESSIONS.where(sessions.c.id == session_id).with_for_update(of=sessions)
        found = (await connection.execute(query)).one_or_none()
    if found is None:
        raise RecordNotFound("There is no session of this id.", param="id")
    return read_session(found)


def read_session(row: Row[Any]) -> Session:
    """Return the session of a row of SESSIONS."""
    of_session = {name: row._mapping[f"session_{name}"] for name in Session.__struct_fields__ if name != "tenant"}
    return Session(**of_session, tenant=None if row.id is None else read_tenant(row))
