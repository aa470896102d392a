"""`/console/audit`: changes of the tenant's own records, by its people and by operators."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from gateway.access.scopes import PRINCIPAL
from gateway.api.admin.audit import read_audit
from gateway.errors import BadRequest
from gateway.pages.console.access import ConsolePages, needs
from gateway.pages.parts.audit_rows import COLUMNS, CSV_COLUMNS, MOST_CSV, audit_row, audit_table
from gateway.pages.parts.tables import ROWS, csv_response
from gateway.quota.kinds import KINDS
from gateway.records.audit import AuditEntry
from gateway.records.tenants.tenants import Tenant

QUERY = ("action", "since", "until", "after", "format")
# Changes that a tenant may see, by the first word of the action.
VISIBLE = ("adapter", "key", "mixture", "session", "tenant", "playground")
# Fields of a tenant that it sees when an operator changes them; notes, tags and the like are the operators' own.
VISIBLE_FIELDS = frozenset(kind.name for kind in KINDS) | {"display_name", "on_token_limit", "suspended"}
OPERATOR = "operator"


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
            which = _read_filter(request.query, tenant)
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


def _read_filter(query: Mapping[str, str], tenant: Tenant) -> dict[str, Any]:
    """Return the filter for the tenant's entries. Raises BadRequest.

    An earlier tenant of the same name has entries from before this one was created.
    """
    given = {name: query[name] for name in ("action", "since", "until", "after") if query.get(name)}
    which = read_audit(given)
    action = which["action"]
    if action is not None and action.partition(".")[0] not in VISIBLE:
        raise BadRequest(f"action: expected one of {', '.join(VISIBLE)}, or such as key.create.", param="action")
    since = tenant.created_at if which["since"] is None else max(which["since"], tenant.created_at)
    return which | {"tenant": tenant.name, "since": since, "action": action or VISIBLE}


def seen_by_tenant(entry: AuditEntry) -> AuditEntry:
    """Return an entry without an operator's identity, and without the fields of the tenant that are for operators."""
    if entry.own:
        return entry
    of_tenant = entry.action.startswith("tenant.")

    def shown(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not of_tenant or name in VISIBLE_FIELDS}

    return msgspec.structs.replace(
        entry,
        actor=OPERATOR,
        actor_label=None,
        address=None,
        request_id=None,
        session_id=None,
        detail=shown(entry.detail),
        before=None if entry.before is None else shown(entry.before),
    )
