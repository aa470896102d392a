"""`/admin/api/audit`: the record of all changes, with their actor, time and address."""

from collections.abc import Mapping
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from gateway.api.requests.fields import json_response, parse_period, parse_text, read_limit
from gateway.records.audit import Audit, AuditEntry

DEFAULT_ENTRIES, MAX_ENTRIES = 100, 1000
MAX_ACTIONS = 20


class AuditPage(Struct, frozen=True, kw_only=True):
    """Page of entries. has_more: whether there are older ones."""

    object: Literal["list"] = "list"
    data: list[AuditEntry]
    has_more: bool


class AdminAudit:
    """Route for audit entries, newest first, in pages."""

    def __init__(self, *, audit: Audit) -> None:
        self._audit = audit

    async def list(self, request: web.Request) -> web.Response:
        limit = read_limit(request, DEFAULT_ENTRIES, MAX_ENTRIES)
        entries, has_more = await self._audit.list(**read_audit(request.query), limit=limit)
        return json_response(AuditPage(data=entries, has_more=has_more))


def read_audit(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the filter of a query, as `Audit.list` takes it. Raises BadRequest."""
    since, until = parse_period(query)
    other = parse_text(query, "not_action") or ""
    return {
        **{name: parse_text(query, name) for name in ("tenant", "actor", "action", "after")},
        "not_actions": [word.strip() for word in other.split(",") if word.strip()][:MAX_ACTIONS],
        "since": since,
        "until": until,
    }
