"""`/console/audit`: changes of the tenant's own records, by its people and by operators."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from gateway.api.reports.audit import read_own_audit, seen_by_tenant
from gateway.api.scopes import PRINCIPAL
from gateway.errors import BadRequest
from gateway.pages.console.access import ConsolePages, needs
from gateway.pages.widgets.audit_rows import COLUMNS, CSV_COLUMNS, Entries, audit_csv, audit_row, audit_table
from gateway.pages.widgets.tables import ROWS
from gateway.records.audit import AuditEntry
from gateway.records.tenants.tenants import Tenant

QUERY = ("action", "since", "until", "after", "format")


class ConsoleAudit(ConsolePages):
    """Page of the tenant's audit log."""

    @needs("keys")
    async def list(self, request: web.Request) -> web.StreamResponse:
        tenant = request[PRINCIPAL].tenant
        errors: dict[str, str] = {}
        entries: Sequence[AuditEntry] = []
        has_more = False
        try:
            read = partial(self._read, tenant, read_own_audit(request.query, tenant))
            if request.query.get("format") == "csv":
                return await audit_csv(request, read, [column for column in CSV_COLUMNS if column.key != "tenant"])
            entries, has_more = await read(limit=ROWS)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        rows = [audit_row(entry) for entry in entries]
        table = audit_table(request, rows, has_more=has_more)
        table.columns = [column for column in COLUMNS if column.key != "tenant"]
        return self.console.frame.render(
            request, "audit.html", title="Audit", status=400 if errors else 200, table=table, errors=errors
        )

    async def _read(self, tenant: Tenant, which: dict[str, Any], **part: Any) -> Entries:
        async with self.console.reads.place(tenant.id):
            entries, has_more = await self.console.records.audit.list(**which | part)
        return [seen_by_tenant(entry) for entry in entries], has_more
