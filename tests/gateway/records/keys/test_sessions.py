"""Sessions in the database: the bound on those of one person."""

import asyncio
from datetime import UTC, datetime, timedelta

from gateway.records.caches.changes import Changes
from gateway.records.keys.sessions import MAX_OF_SUBJECT, Session, SessionRecords
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants

AT_ONCE = 8


def session(number: int, tenant: Tenant | None = None, subject: str = "oidc:ada") -> Session:
    now = datetime.now(UTC) + timedelta(milliseconds=number)
    return Session(
        id=f"{number:016x}",
        token_hash=str(number),
        subject=subject,
        label="Ada",
        role="operator" if tenant is None else "tenant_admin",
        tenant=tenant,
        created_at=now,
        last_used_at=now,
        expires_at=now + timedelta(hours=1),
    )


async def test_sessions_that_are_opened_at_once_stay_within_the_limit(connected: Database):
    records = SessionRecords(connected)
    for number in range(MAX_OF_SUBJECT - 1):
        await records.add(session(number))
    await asyncio.gather(*(records.add(session(100 + number)) for number in range(AT_ONCE)))
    assert len(await records.list(100)) == MAX_OF_SUBJECT


async def test_a_session_that_another_scopes_log_in_ends_is_known_to_have_ended(database: Database):
    """A person may be an operator and belong to tenants; the bound is the person's."""
    acme = await Tenants(database).create("acme", {}, "op")
    records, changes = SessionRecords(database), Changes(database, 3600.0)
    await records.add(session(0, acme))
    await changes.read()
    mark = changes.mark
    for number in range(1, MAX_OF_SUBJECT + 1):
        await records.add(session(number))
    assert await records.find("0") is None
    await changes.read()
    assert not changes.is_unchanged(mark, acme.id)
