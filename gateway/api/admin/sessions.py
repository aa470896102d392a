"""`/admin/api/sessions`: who is logged in, and the end of a session."""

from typing import Any

from aiohttp import web

from gateway.access.scopes import ACTOR
from gateway.access.sessions import Sessions
from gateway.api.requests.fields import json_response, read_limit
from gateway.records.keys.sessions import Session, SessionRecords
from gateway.records.tenants.tenants import Tenants

MAX_SESSIONS = 1000


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
        return json_response({"object": "list", "data": [describe_session(session) for session in found]})

    async def end(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        await self._sessions.close(session_id, request[ACTOR])
        return json_response({"object": "session", "id": session_id, "ended": True})


def describe_session(session: Session) -> dict[str, Any]:
    """Return a session as the API shows it, without the token's hash."""
    return {
        "object": "session",
        "id": session.id,
        "subject": session.subject,
        "label": session.label,
        "role": session.role,
        "tenant": None if session.tenant is None else session.tenant.name,
        "key_id": session.key_id,
        "address": session.address,
        "created_at": session.created_at,
        "last_used_at": session.last_used_at,
        "expires_at": session.expires_at,
    }
