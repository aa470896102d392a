"""`/console/audit`: changes of the tenant's own records, by its people and by operators."""

from aiohttp import web

from gateway.access.scopes import PRINCIPAL
from gateway.api.reports.audit import read_own_audit, seen_by_tenant
from gateway.errors import BadRequest
from gateway.pages.console.access import ConsolePages, needs
from gateway.pages.parts.audit_rows import COLUMNS, CSV_COLUMNS, MOST_CSV, audit_row, audit_table
from gateway.pages.parts.tables import ROWS, csv_response
from gateway.records.audit import AuditEntry

QUERY = ("action", "since", "until", "after", "format")


class ConsoleAudit(ConsolePages):
    """Page of the tenant's audit log."""

    @needs("keys")
    async def list(self, request: web.Request) -> web.StreamResponse:
        tenant = request[PRINCIPAL].tenant
        is_csv = request.query.get("format") == "csv"
        errors: dict[str, str] = {}
        entries: list[AuditEntry] = []
        has_more = False
        try:
            which = read_own_audit(request.query, tenant)
            async with self.console.reads.turn(tenant.id):
                entries, has_more = await self.console.records.audit.list(**which, limit=MOST_CSV if is_csv else ROWS)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        rows = [audit_row(seen_by_tenant(entry)) for entry in entries]
        if is_csv and not errors:
            return csv_response("audit", [column for column in CSV_COLUMNS if column.key != "tenant"], rows)
        table = audit_table(request, rows, has_more=has_more)
        table.columns = [column for column in COLUMNS if column.key != "tenant"]
        return self.console.frame.render(
            request, "audit.html", title="Audit", status=400 if errors else 200, table=table, errors=errors
        )
