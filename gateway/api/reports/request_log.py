"""The request log and the activity: `/admin/api/requests`, `/admin/api/activity`, and `/v1/requests` for a tenant."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from aiohttp import web

from gateway.access.scopes import PRINCIPAL
from gateway.api.reports.money import with_money
from gateway.api.requests.fields import json_response, parse_period, parse_text, read_limit
from gateway.api.requests.log_filter import read_log_filter
from gateway.errors import BadRequest, RecordNotFound
from gateway.records.activity.activity import GROUPS, MAX_GROUPS, ORDERS, Activity, Scope
from gateway.records.activity.periods import STEPS
from gateway.records.requests.log import MAX_PAGE, LogEntry, LogFilter, LogPage, RequestLog, steps
from gateway.sharing.turns import turns_of_reports

DEFAULT_ENTRIES = 50
DEFAULT_GROUPS = 8
# Fields that only operators see.
OPERATORS = ("engine", "tenant_id")


class RequestLogRoutes:
    """Routes of the request log, for operators and for a tenant's own requests. currency: of the costs."""

    def __init__(self, *, log: RequestLog, currency: str) -> None:
        self._log = log
        self._currency = currency
        self._reads = turns_of_reports()

    async def list(self, request: web.Request) -> web.Response:
        """List requests of all tenants or of `?tenant=`, newest first."""
        return self._answer(await self._page(request, read_log_filter(request)), ())

    async def get(self, request: web.Request) -> web.Response:
        entry = await self._log.find(request.match_info["id"])
        return self._one(entry, ())

    async def list_own(self, request: web.Request) -> web.Response:
        """List the tenant's requests to the models that the key may use."""
        principal = request[PRINCIPAL]
        own = {"tenant_id": principal.tenant.id, "models": principal.allowed_models}
        which = msgspec.structs.replace(read_log_filter(request), **own)
        async with self._reads.turn(principal.tenant.id):
            return self._answer(await self._page(request, which), OPERATORS)

    async def get_own(self, request: web.Request) -> web.Response:
        principal = request[PRINCIPAL]
        async with self._reads.turn(principal.tenant.id):
            entry = await self._log.find(request.match_info["id"], tenant_id=principal.tenant.id)
        if entry is not None and not principal.may_use(entry.model or ""):
            entry = None
        return self._one(entry, OPERATORS)

    async def _page(self, request: web.Request, which: LogFilter) -> LogPage:
        limit = read_limit(request, DEFAULT_ENTRIES, MAX_PAGE)
        return await self._log.page(which, after=parse_text(request.query, "after"), limit=limit)

    def _answer(self, page: LogPage, hidden: tuple[str, ...]) -> web.Response:
        entries = [_shown(entry, hidden) for entry in page.entries]
        return json_response({"object": "list", "currency": self._currency, "data": entries, "next": page.next})

    def _one(self, entry: LogEntry | None, hidden: tuple[str, ...]) -> web.Response:
        if entry is None:
            raise RecordNotFound("There is no such request on record. It may still be running.", param="id")
        shown = _shown(entry, hidden)
        return json_response({"object": "request", "currency": self._currency, **shown, "steps": steps(entry)})


class ActivityRoutes:
    """Route of the activity of a period, for charts. currency: of the costs."""

    def __init__(self, *, activity: Activity, currency: str) -> None:
        self._activity = activity
        self._currency = currency

    async def get(self, request: web.Request) -> web.Response:
        """Report the activity since `?since=`, by default in the last day."""
        since, until = parse_period(request.query)
        report = await self._activity.report(
            since=since or (until or datetime.now(UTC)) - timedelta(days=1),
            until=until,
            scope=Scope(**{name: parse_text(request.query, name) for name in ("tenant", "model", "engine")}),
            group_by=_read_choice(request, "group_by", GROUPS),
            order=_read_choice(request, "order", ORDERS) or "requests",
            top=read_limit(request, DEFAULT_GROUPS, MAX_GROUPS),
            step=_read_step(request),
        )
        found = with_money(msgspec.to_builtins(report))
        return json_response({"object": "activity", "currency": self._currency, **found})


def _shown(entry: LogEntry, hidden: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(entry)
    for name in hidden:
        del found[name]
    return with_money(found)


def _read_step(request: web.Request) -> int | None:
    given = request.query.get("step")
    if given is not None and given not in map(str, STEPS):
        raise BadRequest(f"step: expected one of {', '.join(map(str, STEPS))} (seconds).", param="step")
    return None if given is None else int(given)


def _read_choice(request: web.Request, name: str, choices: tuple[Any, ...]) -> Any:
    given = request.query.get(name)
    if given is not None and given not in choices:
        raise BadRequest(f"{name}: expected one of {', '.join(choices)}.", param=name)
    return given
