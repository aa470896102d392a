"""Tenants and sessions that a running request needs in place of a key, or beside it."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.keys.session_table import sessions
from gateway.records.keys.sessions import SESSIONS, read_session
from gateway.records.sql.tables import tenants
from gateway.records.tenants.tenants import Tenant, read_tenant

# Prefixes of a tenant's id and of a session's id in place of a key's id.
TENANT_ITSELF, SESSION_ITSELF = "tenant:", "session:"


class Watched(NamedTuple):
    """A tenant or a session by its id with the prefix. tenant: None for an operator's session."""

    id: str
    tenant: Tenant | None
    created_at: datetime
    expires_at: datetime | None = None


async def find_watched(connection: AsyncConnection, ids: Sequence[str]) -> list[Watched]:
    """Return those of the tenants and sessions that exist. Ids of keys are ignored."""
    found: list[Watched] = []
    if of_tenants := _without(TENANT_ITSELF, ids):
        rows = await connection.execute(select(tenants).where(tenants.c.id.in_(of_tenants)))
        found += [Watched(f"{TENANT_ITSELF}{row.id}", read_tenant(row), row.created_at) for row in rows]
    if of_sessions := _without(SESSION_ITSELF, ids):
        rows = await connection.execute(SESSIONS.where(sessions.c.id.in_(of_sessions)))
        for each in map(read_session, rows):
            found.append(Watched(f"{SESSION_ITSELF}{each.id}", each.tenant, each.created_at, each.expires_at))
    return found


def _without(prefix: str, ids: Sequence[str]) -> list[str]:
    return [each.removeprefix(prefix) for each in ids if each.startswith(prefix)]
