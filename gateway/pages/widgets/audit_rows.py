"""Table of the audit log, on the page of the whole log, on a tenant's page and in its console."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from aiohttp import web

from gateway.api.reports.files import csv_parts, send_file
from gateway.pages.frame.frame import link
from gateway.pages.widgets.audit_values import Change, changes_of, clipped, sentence
from gateway.pages.widgets.tables import CSV_AT_ONCE, MAX_CSV, Column, Table
from gateway.records.audit import AuditEntry

# Words for actions; others are shown by their names.
ACTIONS = {
    "adapter.alias": "Alias set",
    "adapter.alias_delete": "Alias deleted",
    "adapter.collect": "Unused content removed from the store",
    "adapter.delete": "Adapter deleted",
    "adapter.golden": "Golden answers changed",
    "adapter.push": "Adapter uploaded",
    "adapter.rollback": "Adapter rolled back",
    "adapter.version": "Version changed",
    "base.add": "Base model added",
    "base.change": "Base model changed",
    "engine.drain": "Engine drained",
    "engine.resume": "Engine resumed",
    "key.create": "Key created",
    "key.revoke": "Key revoked",
    "key.rotate": "Key rotated",
    "key.update": "Key changed",
    "login.failed": "Log-in failed",
    "mixture.delete": "Mixture deleted",
    "mixture.save": "Mixture saved",
    "plan.delete": "Plan deleted",
    "plan.put": "Plan saved",
    "playground.request": "Request from the playground",
    "price.delete": "Price deleted",
    "price.put": "Price set",
    "quarantine.end": "Quarantine ended",
    "session.close": "Logged out",
    "session.open": "Logged in",
    "session.revoke": "Session ended",
    "tenant.create": "Tenant created",
    "tenant.delete": "Tenant deleted",
    "tenant.resume": "Tenant resumed",
    "tenant.suspend": "Tenant suspended",
    "tenant.update": "Tenant changed",
    "usage.prune": "Usage rows removed",
    "webhook.delete": "Alert target deleted",
    "webhook.put": "Alert target saved",
}
COLUMNS = (
    Column("at", "Time", sortable=False),
    Column("action", "Action", sortable=False),
    Column("tenant", "Tenant", sortable=False),
    Column("target", "Target", sortable=False),
    Column("actor", "Actor", sortable=False),
    Column("address", "Address", sortable=False),
    Column("changes", "Before → after", sortable=False, value=lambda row: row.text),
)
# The file has these too.
CSV_COLUMNS = (*COLUMNS, Column("actor_label", "Actor's label"), Column("request_id", "Request"), Column("id", "Id"))


Entries = tuple[Sequence[AuditEntry], bool]
"""Entries, and whether there are more."""


class AuditRow(NamedTuple):
    """Entry as the page shows it."""

    id: str
    at: datetime
    action: str
    tenant: str | None
    target: str
    actor: str
    actor_label: str | None
    address: str | None
    request_id: str | None
    changes: Sequence[Change]

    @property
    def words(self) -> str:
        """Return the action in words, "" if there are none for it."""
        return ACTIONS.get(self.action, "")

    @property
    def shown(self) -> Sequence[Change]:
        """Return the changes with their long values cut."""
        return [(name, None if old is None else clipped(old), clipped(new)) for name, old, new in self.changes]

    @property
    def text(self) -> str:
        return sentence(self.changes)


def audit_table(request: web.Request, rows: Sequence[AuditRow], *, has_more: bool) -> Table:
    next_link = link(request, after=rows[-1].id) if has_more else None
    previous = link(request, after=None) if request.query.get("after") else None
    return Table("audit", COLUMNS, rows, next_link=next_link, previous_link=previous)


async def audit_csv(
    request: web.Request, read: Callable[..., Awaitable[Entries]], columns: Sequence[Column]
) -> web.StreamResponse:
    """Stream the entries as CSV, MAX_CSV at most.

    read: returns entries, for `limit` and `after` as `Audit.list`. Raises an error that its first call raises.
    """
    first = await read(limit=CSV_AT_ONCE)
    parts = csv_parts([column.key for column in columns], _csv_pages(read, first, columns))
    return await send_file(request, "audit.csv", "text/csv", parts)


async def _csv_pages(
    read: Callable[..., Awaitable[Entries]], page: Entries, columns: Sequence[Column]
) -> AsyncIterator[list[list[Any]]]:
    for _ in range(0, MAX_CSV, CSV_AT_ONCE):
        entries, has_more = page
        yield [[column.of(row) for column in columns] for row in map(audit_row, entries)]
        if not has_more:
            return
        page = await read(limit=CSV_AT_ONCE, after=entries[-1].id)


def audit_row(entry: AuditEntry) -> AuditRow:
    return AuditRow(
        entry.id,
        entry.at,
        entry.action,
        entry.tenant,
        entry.target,
        entry.actor,
        entry.actor_label,
        entry.address,
        entry.request_id,
        changes_of(entry.action, entry.detail, entry.before),
    )
