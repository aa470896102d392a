"""`/admin/api/sessions`: who is logged in, and the end of a session."""

from datetime import datetime
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.access.sessions import Sessions
from gateway.api.requests.fields import json_response, read_limit
from gateway.api.scopes import ACTOR
from gateway.records.keys.sessions import Session, SessionRecords
from gateway.records.tenants.tenants import Tenants

MAX_SESSIONS = 1000


class ShownSession(Struct, frozen=True, kw_only=True):
    """A session of a browser, without its token.

    subject: the actor of its changes: a key's id, or `oidc:` and the provider's subject. tenant: null for operators.
    key_id: the key that opened it, or null. address: the client's at log-in.
    """

    object: Literal["session"] = "session"
    id: str
    subject: str
    label: str
    role: str
    tenant: str | None
    key_id: str | None
    address: str | None
    created_at: datetime
    last_used_at: datetime
    expires_at: datetime


class SessionList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ShownSession]


class EndedSession(Struct, frozen=True, kw_only=True):
    object: Literal["session"] = "session"
    id: str
    ended: bool = True


class AdminSessions:
    """Routes for the sessions of browsers, of operators and of tenants."""

    def __init__(self, *, sessions: Sessions, records: SessionRecords, tenants: Tenants) -> None:
        self._sessions = sessions
        self._records = records
        self._tenants = tenants

    async def list(self, request: web.Request) -> web.Response:
        """List the newest sessions of everyone, or of `?tenant=`."""
        name = request.query.get("tenant")
        tenant_id = None if name is None else (await self._tenants.get(name)).id
        found = await self._records.list(read_limit(request, MAX_SESSIONS, MAX_SESSIONS), tenant_id)
        return json_response(SessionList(data=[describe_session(session) for session in found]))

    async def end(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        await self._sessions.close(session_id, request[ACTOR])
        return json_response(EndedSession(id=session_id))


def describe_session(session: Session) -> ShownSession:
    """Return a session as the API shows it."""
    return ShownSession(
        id=session.id,
        subject=session.subject,
        label=session.label,
        role=session.role,
        tenant=None if session.tenant is None else session.tenant.name,
        key_id=session.key_id,
        address=session.address,
        created_at=session.created_at,
        last_used_at=session.last_used_at,
        expires_at=session.expires_at,
    )
