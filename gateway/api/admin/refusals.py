"""`/admin/api/refusals`: refused requests by tenant, limit and code, and the reserved tokens that stay unused."""

from datetime import UTC, datetime, timedelta
from typing import Literal

from aiohttp import web
from msgspec import structs

from gateway.api.requests.fields import json_response, parse_period, parse_text
from gateway.errors import BadRequest
from gateway.records.requests.refusal_report import (
    GROUPS,
    LIMITED,
    GroupBy,
    RefusalFilter,
    RefusalReport,
    RefusalSums,
    Reserved,
)

QUERY = ("tenant", "code", "limit_name", "status", "since", "until", "group_by")
ALL = "all"


class RefusalsAnswer(RefusalSums, frozen=True, kw_only=True):
    """Refusals of a period, and reserved against settled tokens by tenant."""

    object: Literal["refusals"] = "refusals"
    reserved: list[Reserved]


class AdminRefusals:
    """Route for the refusals of a period, by default of the last day."""

    def __init__(self, *, report: RefusalReport) -> None:
        self._report = report

    async def get(self, request: web.Request) -> web.Response:
        since, until = parse_period(request.query)
        until = until or datetime.now(UTC)
        since = since or until - timedelta(days=1)
        criteria = read_refusal_filter(request)
        sums = await self._report.sums(criteria, since=since, until=until, group_by=read_group(request))
        reserved = await self._report.reserved(since=since, until=until, tenant=criteria.tenant)
        return json_response(RefusalsAnswer(**structs.asdict(sums), reserved=reserved))


def read_refusal_filter(request: web.Request) -> RefusalFilter:
    """Return the filter of the query. `?status=` is 429 by default. Raises BadRequest."""
    given = request.query.get("status") or str(LIMITED)
    if given != ALL and not (given.isascii() and given.isdigit() and len(given) <= 3):
        raise BadRequest(f"status: expected an HTTP status or {ALL}.", param="status")
    return RefusalFilter(
        tenant=parse_text(request.query, "tenant"),
        code=parse_text(request.query, "code"),
        limit_name=parse_text(request.query, "limit_name"),
        status=None if given == ALL else int(given),
    )


def read_group(request: web.Request) -> GroupBy:
    """Return `?group_by=`. Raises BadRequest."""
    given = request.query.get("group_by") or GROUPS[0]
    for name in GROUPS:
        if given == name:
            return name
    raise BadRequest(f"group_by: expected one of {', '.join(GROUPS)}.", param="group_by")
