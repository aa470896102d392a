"""Tenants and sessions that a running request needs in place of a key, or beside it."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.keys.session_table import sessions
from gateway.records.tables import tenants
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
        rows = await connection.execute(_SESSIONS.where(sessions.c.id.in_(of_sessions)))
        found += [_session(row) for row in rows]
    return found


_OWN = ("id", "created_at", "expires_at")
_SESSIONS = select(*(sessions.c[name].label(f"session_{name}") for name in _OWN), tenants).join_from(
    sessions, tenants, isouter=True
)


def _session(row: Row[Any]) -> Watched:
    tenant = None if row.id is None else read_tenant(row)
    return Watched(f"{SESSION_ITSELF}{row.session_id}", tenant, row.session_created_at, row.session_expires_at)


def _without(prefix: str, ids: Sequence[str]) -> list[str]:
    return [each.removeprefix(prefix) for each in ids if each.startswith(prefix)]
