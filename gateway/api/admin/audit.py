"""`/admin/api/audit`: the record of all changes, with their actor, time and address."""

from aiohttp import web

from gateway.api.requests.fields import json_response, read_limit, read_period
from gateway.errors import BadRequest
from gateway.records.audit import Audit

DEFAULT_ENTRIES, MAX_ENTRIES = 100, 1000
# Longest text of a filter; all stored values are shorter. Texts are printable, because databases refuse a NUL.
MAX_CHARS = 256


class AdminAudit:
    """Route for audit entries, newest first, in pages."""

    def __init__(self, *, audit: Audit) -> None:
        self._audit = audit

    async def list(self, request: web.Request) -> web.Response:
        since, until = read_period(request)
        entries, has_more = await self._audit.list(
            tenant=_read_text(request, "tenant"),
            actor=_read_text(request, "actor"),
            action=_read_text(request, "action"),
            since=since,
            until=until,
            after=_read_text(request, "after"),
            limit=read_limit(request, DEFAULT_ENTRIES, MAX_ENTRIES),
        )
        return json_response({"object": "list", "data": entries, "has_more": has_more})


def _read_text(request: web.Request, name: str) -> str | None:
    given = request.query.get(name)
    if given is not None and not (given.isprintable() and 0 < len(given) <= MAX_CHARS):
        raise BadRequest(f"{name}: expected 1 to {MAX_CHARS} printable characters.", param=name)
    return given
