"""The request log: `/admin/api/requests`, and `/v1/requests` for a tenant."""

from typing import Any, Literal

import msgspec
from aiohttp import web

from gateway.api.reports.money import priced, priced_struct
from gateway.api.requests.fields import json_response, parse_text, read_limit
from gateway.api.requests.log_filter import read_log_filter
from gateway.api.scopes import PRINCIPAL
from gateway.errors import RecordNotFound
from gateway.records.requests.log import MAX_PAGE, LogEntry, LogFilter, LogPage, RequestLog, Step, steps
from gateway.sharing.concurrency import report_limiter

DEFAULT_ENTRIES = 50
# Fields that only operators see.
OPERATORS = ("engine", "tenant_id")


# Types of the fields that only the story of one request has.
_STORY: dict[str, Any] = {"object": Literal["request"], "currency": str, "steps": list[Step]}
_TIMES = (
    "Times are in ms from the request's arrival, except `queue_ms`, the wait in queues after the admission. "
    "key: label of the key `key_id`; null if it is gone. code: the error's."
)
LoggedRequest: Any = priced_struct("LoggedRequest", LogEntry, f"A request. {_TIMES}")
OwnLoggedRequest: Any = priced_struct("OwnLoggedRequest", LogEntry, f"A request of the tenant. {_TIMES}", OPERATORS)
RequestStory: Any = priced_struct("RequestStory", LogEntry, f"A request with its steps. {_TIMES}", **_STORY)
OwnRequestStory: Any = priced_struct(
    "OwnRequestStory", LogEntry, f"A request of the tenant with its steps. {_TIMES}", OPERATORS, **_STORY
)


class RequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """Page of requests. currency: the costs' currency. next: `after` of the next page; null on the last one."""

    object: Literal["list"] = "list"
    currency: str
    data: list[LoggedRequest]
    next: str | None


class OwnRequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """Page of a tenant's own requests; see RequestPage."""

    object: Literal["list"] = "list"
    currency: str
    data: list[OwnLoggedRequest]
    next: str | None


class RequestLogRoutes:
    """Routes of the request log, for operators and for a tenant's own requests. currency: the costs' currency."""

    def __init__(self, *, log: RequestLog, currency: str) -> None:
        self._log = log
        self._currency = currency
        self._reads = report_limiter()

    async def list(self, request: web.Request) -> web.Response:
        """List requests of all tenants or of `?tenant=`, newest first."""
        page = await self._page(request, read_log_filter(request))
        data = [priced(LoggedRequest, entry) for entry in page.entries]
        return json_response(RequestPage(currency=self._currency, data=data, next=page.next))

    async def get(self, request: web.Request) -> web.Response:
        entry = await self._log.find(request.match_info["id"])
        return self._one(entry, RequestStory)

    async def list_own(self, request: web.Request) -> web.Response:
        """List the tenant's requests to the models that the key may use."""
        principal = request[PRINCIPAL]
        own = {"tenant_id": principal.tenant.id, "models": principal.allowed_models}
        criteria = msgspec.structs.replace(read_log_filter(request), **own)
        async with self._reads.place(principal.tenant.id):
            page = await self._page(request, criteria)
        data = [priced(OwnLoggedRequest, entry) for entry in page.entries]
        return json_response(OwnRequestPage(currency=self._currency, data=data, next=page.next))

    async def get_own(self, request: web.Request) -> web.Response:
        principal = request[PRINCIPAL]
        async with self._reads.place(principal.tenant.id):
            entry = await self._log.find(request.match_info["id"], tenant_id=principal.tenant.id)
        if entry is not None and not principal.may_use(entry.model or ""):
            entry = None
        return self._one(entry, OwnRequestStory)

    async def _page(self, request: web.Request, criteria: LogFilter) -> LogPage:
        limit = read_limit(request, DEFAULT_ENTRIES, MAX_PAGE)
        return await self._log.page(criteria, after=parse_text(request.query, "after"), limit=limit)

    def _one(self, entry: LogEntry | None, kind: Any) -> web.Response:
        if entry is None:
            raise RecordNotFound("There is no such request on record. It may still be running.", param="id")
        return json_response(priced(kind, entry, object="request", currency=self._currency, steps=steps(entry)))
