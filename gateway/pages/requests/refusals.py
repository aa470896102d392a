"""Page `/admin/refusals`: why requests were refused, by tenant, limit and time, and reserved against settled tokens."""

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from gateway.api.admin.refusals import ALL, read_group, read_refusal_filter
from gateway.errors import BadRequest
from gateway.pages.frame.frame import Frame
from gateway.pages.requests.refusal_texts import NO_KEY, OUTCOMES, advice, limits_shown, sentence, title
from gateway.pages.widgets import periods
from gateway.pages.widgets.limit_titles import limit_title
from gateway.pages.widgets.links import Links
from gateway.pages.widgets.periods import PagePeriod, as_field, read_period, segments_of
from gateway.pages.widgets.tables import Column, csv_response, fill, read_second, read_table
from gateway.records.requests.refusal_report import (
    GROUPS,
    NEWEST,
    OTHERS,
    RESERVED_HOURS,
    Cause,
    RefusalReport,
    RefusalSums,
)

LISTED = ("sort", "reserved_sort", "page", "format", "table")
QUERY = (*periods.QUERY, "tenant", "code", "limit_name", "status", "group_by", *LISTED)
PERIODS = ("1h", "24h", "7d", "30d")
COLUMNS = (
    Column("tenant", "Tenant"),
    Column("limit_name", "Limit"),
    Column("outcome", "Outcome"),
    Column("code", "Code"),
    Column("status", "Status", numeric=True),
    Column("requests", "Refused", numeric=True),
)
RESERVED_COLUMNS = (
    Column("tenant", "Tenant"),
    Column("requests", "Requests", numeric=True),
    Column("reserved", "Reserved", numeric=True, hint="Tokens that admission reserved"),
    Column("settled", "Settled", numeric=True, hint="Tokens that were charged at the end"),
    Column("unused", "Unused", numeric=True, hint="Reserved tokens that were released at the end"),
    Column("unused_share", "Share unused"),
)


class RefusalPages:
    """Page of refusals. currency: the budgets' currency."""

    def __init__(self, frame: Frame, report: RefusalReport, currency: str) -> None:
        self._frame = frame
        self._report = report
        self._currency = currency

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Return the page, or its table with `?format=csv`. An error of the filter is shown at its field."""
        now = datetime.now(UTC)
        errors: dict[str, str] = {}
        try:
            span, criteria, group_by = (
                read_period(request, "24h", now),
                read_refusal_filter(request),
                read_group(request),
            )
            table = read_table(request, "refusals", COLUMNS, "-requests")
            reserved = read_second(request, "reserved", RESERVED_COLUMNS, "-unused")
            sums = await self._report.sums(criteria, since=span.since, until=span.until, group_by=group_by)
        except BadRequest as error:
            if request.query.get("format"):
                raise
            errors[error.param or ""] = error.message
            return await self._show(request, now, errors=errors)
        is_csv = request.query.get("format") == "csv"
        if is_csv and request.query.get("table") != "reserved":
            return csv_response("refusals", COLUMNS, sums.causes)
        rows = await self._report.reserved(since=span.since, until=span.until, tenant=criteria.tenant)
        if is_csv:
            return csv_response("reserved-tokens", RESERVED_COLUMNS[:-1], rows)
        return await self._show(
            request,
            now,
            span=span,
            sums=sums,
            table=fill(table, sums.causes),
            group_by=group_by,
            reserved=fill(reserved, rows),
        )

    async def _show(
        self,
        request: web.Request,
        now: datetime,
        *,
        span: PagePeriod | None = None,
        sums: RefusalSums | None = None,
        **context: Any,
    ) -> web.Response:
        defaults: dict[str, Any] = {"errors": {}, "table": None, "reserved": None, "group_by": GROUPS[0]}
        shown = defaults | context
        return await self._frame.render_long(
            request,
            "refusals.html",
            title="Why 429",
            status=400 if shown["errors"] else 200,
            span=span,
            sums=sums,
            periods=segments_of(request, span or PagePeriod("", now, now), PERIODS),
            group_names=GROUPS,
            chart=None if sums is None else _chart(sums, shown["group_by"]),
            findings=[] if sums is None else [self._finding(cause, sums, request, now) for cause in _explained(sums)],
            links=Links(request),
            limit_title=limit_title,
            no_key=NO_KEY,
            outcomes=OUTCOMES,
            newest=NEWEST,
            reserved_hours=RESERVED_HOURS,
            bounds={} if sums is None else {"since": as_field(sums.since), "until": as_field(sums.until)},
            is_all=request.query.get("status") == ALL,
            **shown,
        )

    def _finding(self, cause: Cause, sums: RefusalSums, request: web.Request, now: datetime) -> dict[str, Any]:
        return {
            "tenant": cause.tenant,
            "title": title(cause),
            "sentence": sentence(cause, self._currency, now, sums.step),
            "limits": limits_shown(cause, self._currency),
            "advice": advice(cause),
            "requests": Links(request).requests(
                tenant=cause.tenant,
                code=cause.code,
                limit_name=cause.limit_name,
                status="not_admitted" if cause.status else "failed",
                since=as_field(sums.since),
                until=as_field(sums.until),
            ),
        }


def _explained(sums: RefusalSums) -> list[Cause]:
    return [cause for cause in sums.causes if cause.peak is not None]


def _chart(sums: RefusalSums, group_by: str) -> dict[str, Any]:
    def name(group: str) -> str:
        if group in ("", OTHERS):
            return "others" if group else NO_KEY
        return limit_title(group) if group_by == "limit" else group

    return {
        "times": [int(start.timestamp()) for start in sums.starts] if sums.total else [],
        "series": [{"name": name(group), "values": values} for group, values in sums.curves.items()],
        "unit": "requests",
        "stacked": True,
        "kind": "bar",
    }
