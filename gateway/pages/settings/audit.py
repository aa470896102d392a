"""Page of the audit log."""

from aiohttp import web

from gateway.api.admin.audit import read_audit
from gateway.errors import BadRequest
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.audit_rows import CSV_COLUMNS, audit_csv, audit_row, audit_table
from gateway.pages.widgets.tables import ROWS
from gateway.records.audit import Audit, AuditEntry

QUERY = ("tenant", "actor", "action", "not_action", "since", "until", "after", "format")


class AuditPages:
    """Page of the audit log."""

    def __init__(self, frame: Frame, audit: Audit) -> None:
        self._frame = frame
        self._audit = audit

    async def list(self, request: web.Request) -> web.StreamResponse:
        errors: dict[str, str] = {}
        entries: list[AuditEntry] = []
        has_more = False
        try:
            which = read_audit({name: value for name, value in request.query.items() if value})
            if request.query.get("format") == "csv":
                return await audit_csv(request, lambda **part: self._audit.list(**which | part), CSV_COLUMNS)
            entries, has_more = await self._audit.list(**which, limit=ROWS)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        rows = [audit_row(entry) for entry in entries]
        return self._frame.render(
            request,
            "audit.html",
            title="Audit",
            status=400 if errors else 200,
            table=audit_table(request, rows, has_more=has_more),
            errors=errors,
        )
