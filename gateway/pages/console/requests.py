"""`/console/requests`: the tenant's own request log, its exports, and one request, without engines."""

import msgspec
from aiohttp import web

from gateway.api.requests.log_filter import read_log_filter
from gateway.api.scopes import PRINCIPAL
from gateway.pages.console.access import Console, needs
from gateway.pages.console.links import ConsoleLinks
from gateway.pages.requests import log as requests
from gateway.pages.requests.export import FIELDS
from gateway.pages.requests.log import RequestPages
from gateway.pages.widgets.tables import Column
from gateway.records.requests.log import LogEntry, LogFilter, LogPage, RequestLog

# Filters and columns about the service; a tenant does not see them.
HIDDEN = ("tenant", "tenant_id", "engine")
QUERY = tuple(name for name in requests.QUERY if name not in HIDDEN)
KEY = Column("key", "Key", sortable=False)


class ConsoleRequests(RequestPages):
    """Pages of the tenant's own requests to the models that the key may use. Tenants' reads take turns."""

    columns = tuple(
        KEY if each.key == "tenant" else each for each in requests.COLUMNS if each.key not in ("tenant_id", "engine")
    )
    fields = tuple(name for name in FIELDS if name not in HIDDEN)
    filters = tuple(name for name in requests.FILTERS if name not in HIDDEN)

    def __init__(self, console: Console, log: RequestLog) -> None:
        super().__init__(console.frame, log, console.currency)
        self.console = console

    @needs("usage")
    async def list(self, request: web.Request) -> web.StreamResponse:
        return await super().list(request)

    @needs("usage")
    async def one(self, request: web.Request) -> web.StreamResponse:
        return await super().one(request)

    def links(self, request: web.Request) -> ConsoleLinks:
        return ConsoleLinks(request)

    def read_filter(self, request: web.Request) -> LogFilter:
        """Return the filter of the query, always restricted to the tenant and the key's models."""
        principal = request[PRINCIPAL]
        own = {"tenant": None, "tenant_id": principal.tenant.id, "models": principal.allowed_models, "engine": None}
        return msgspec.structs.replace(read_log_filter(request), **own)

    async def page(self, request: web.Request, criteria: LogFilter, *, after: str | None = None, limit: int) -> LogPage:
        own = msgspec.structs.replace(criteria, tenant_id=request[PRINCIPAL].tenant.id)
        async with self.console.reads.place(own.tenant_id or ""):
            page = await self._log.page(own, after=after, limit=limit)
        return msgspec.structs.replace(page, entries=[_shown(entry) for entry in page.entries])

    async def find(self, request: web.Request, request_or_answer_id: str) -> LogEntry | None:
        principal = request[PRINCIPAL]
        async with self.console.reads.place(principal.tenant.id):
            entry = await self._log.find(request_or_answer_id, tenant_id=principal.tenant.id)
        return None if entry is None or not principal.may_use(entry.model or "") else _shown(entry)


def _shown(entry: LogEntry) -> LogEntry:
    return msgspec.structs.replace(entry, engine=None)
