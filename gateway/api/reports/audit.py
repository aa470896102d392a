"""`/v1/audit`: changes of a tenant's own records, by its people and by operators."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from aiohttp import web

from gateway.api.admin.audit import DEFAULT_ENTRIES, MAX_ENTRIES, read_audit
from gateway.api.requests.fields import json_response, read_limit
from gateway.api.scopes import PRINCIPAL
from gateway.errors import BadRequest
from gateway.limits.kinds import KINDS
from gateway.records.audit import Audit, AuditEntry
from gateway.records.tenants.tenants import Tenant
from gateway.sharing.concurrency import report_limiter

QUERY = ("action", "since", "until", "limit", "after")
# Changes that a tenant may see, by the first word of the action.
VISIBLE = ("adapter", "key", "mixture", "session", "tenant", "playground")
# Fields of a tenant that it sees when an operator changes them; notes, tags and the like are the operators' own.
VISIBLE_FIELDS = frozenset(kind.name for kind in KINDS) | {
    *("budget_warn_at", "display_name", "on_token_limit", "suspended"),
}
OPERATOR = "operator"


class OwnAuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """Page of entries. next: `after` of the next page; null on the last one."""

    object: Literal["list"] = "list"
    data: list[AuditEntry]
    next: str | None


class OwnAudit:
    """Route for a tenant's own entries, newest first, in pages."""

    def __init__(self, *, audit: Audit) -> None:
        self._audit = audit
        self._reads = report_limiter()

    async def list(self, request: web.Request) -> web.Response:
        tenant = request[PRINCIPAL].tenant
        which, limit = read_own_audit(request.query, tenant), read_limit(request, DEFAULT_ENTRIES, MAX_ENTRIES)
        async with self._reads.place(tenant.id):
            entries, has_more = await self._audit.list(**which, limit=limit)
        shown = [seen_by_tenant(entry) for entry in entries]
        return json_response(OwnAuditPage(data=shown, next=entries[-1].id if has_more else None))


def read_own_audit(query: Mapping[str, str], tenant: Tenant) -> dict[str, Any]:
    """Return the filter for the tenant's entries, as `Audit.list` takes it. Raises BadRequest.

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
