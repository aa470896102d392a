"""Pages of the request log: `/admin/requests`, its exports, and one request."""

import math
import re
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.api.requests.fields import parse_text
from gateway.api.requests.log_filter import FILTERS, read_log_filter
from gateway.errors import BadRequest
from gateway.pages.frame.frame import Frame, link
from gateway.pages.requests.export import FIELDS, export_log
from gateway.pages.requests.request_texts import (
    amount,
    decode_rate,
    explain,
    reason,
    settled_tokens,
    stages,
)
from gateway.pages.widgets.limit_titles import limit_title
from gateway.pages.widgets.links import Links
from gateway.pages.widgets.periods import as_field
from gateway.pages.widgets.states import OUTCOMES, outcome
from gateway.pages.widgets.tables import ROWS, Column, Table
from gateway.records.requests.log import LogEntry, LogFilter, LogPage, RequestLog

QUERY = (*FILTERS, "id", "after", "live", "format")
COLUMNS = (
    Column("at", "Time (UTC)", sortable=False),
    Column("tenant", "Tenant and key", sortable=False),
    Column("model", "Model and end user", sortable=False),
    Column("status", "Outcome", sortable=False),
    Column("prompt_tokens", "In", numeric=True, sortable=False, hint="Prompt tokens; below, those from the cache"),
    Column("completion_tokens", "Out", numeric=True, sortable=False, hint="Tokens of the answer"),
    Column("cost", "Cost", numeric=True, sortable=False),
    Column(
        "queue_ms",
        "Queue",
        numeric=True,
        sortable=False,
        hint="Wait after the admission, in the gateway and on an engine of ours",
    ),
    Column("ttft_ms", "First token", numeric=True, sortable=False, hint="From the arrival; streams only"),
    Column("latency_ms", "Total", numeric=True, sortable=False, hint="From the arrival to the end"),
    Column("engine", "Engine", sortable=False),
)
STATUS_OPTIONS = (
    ("", "any"),
    ("failed", "all but completed"),
    *((status, words) for status, (words, _) in OUTCOMES.items()),
)
# Filters that are always shown. The others are under "More filters" unless one of them is in use.
FIRST = ("tenant", "model", "status", "since", "until")
# Time before and after a request that "around" covers.
AROUND = timedelta(minutes=1)


class RequestPages:
    """Pages of the request log. The console's pages (console/requests.py) replace the hooks.

    currency: the costs' currency. trace_url: template of a trace's URL, None for no links to traces.
    """

    columns: Sequence[Column] = COLUMNS
    fields: Sequence[str] = FIELDS
    filters: Sequence[str] = FILTERS

    def __init__(self, frame: Frame, log: RequestLog, currency: str, trace_url: str | None = None) -> None:
        self._frame = frame
        self._log = log
        self._currency = currency
        self._trace_url = trace_url

    async def list(self, request: web.Request) -> web.StreamResponse:
        """Return a page of the log, or with `?format=` all of it. An error of the filter is shown at its field."""
        if given := request.query.get("id", "").strip():
            raise web.HTTPSeeOther(self.links(request).request(given))
        if request.query.get("format"):
            return await export_log(
                request, partial(self.page, request), self.read_filter(request), self._currency, self.fields
            )
        errors: dict[str, str] = {}
        page, criteria = LogPage(entries=[], next=None), LogFilter()
        try:
            criteria = self.read_filter(request)
            page = await self.page(request, criteria, after=parse_text(request.query, "after"), limit=ROWS)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        used = [name for name in self.filters if request.query.get(name)]
        return await self._frame.render_long(
            request,
            "requests.html",
            title="Requests",
            status=400 if errors else 200,
            table=_table(request, page, self.columns),
            errors=errors,
            is_live=request.query.get("live") == "1" and not request.query.get("after"),
            has_more_filters=any(name not in FIRST for name in used),
            is_filtered=bool(used),
            statuses=STATUS_OPTIONS,
            times={"since": as_field(criteria.since), "until": as_field(criteria.until)},
            links=self.links(request),
            outcome=outcome,
            limit_title=limit_title,
        )

    async def one(self, request: web.Request) -> web.StreamResponse:
        """Return the page of a request by its id or its answer's id."""
        given = request.match_info["id"]
        try:
            entry = await self.find(request, given)
        except BadRequest:
            entry = None
        if entry is None:
            return self._frame.render(request, "request_missing.html", title="Request", status=404, given=given)
        return self._frame.render(request, "request.html", title="Request", **self._story(request, entry))

    def links(self, request: web.Request) -> Links:
        return Links(request)

    def read_filter(self, request: web.Request) -> LogFilter:
        return read_log_filter(request)

    async def page(self, request: web.Request, criteria: LogFilter, *, after: str | None = None, limit: int) -> LogPage:
        return await self._log.page(criteria, after=after, limit=limit)

    async def find(self, request: web.Request, request_or_answer_id: str) -> LogEntry | None:
        return await self._log.find(request_or_answer_id)

    def _story(self, request: web.Request, entry: LogEntry) -> dict[str, Any]:
        way = stages(entry)
        settled = settled_tokens(entry)
        words, tone = outcome(entry)
        limit = entry.limit
        return {
            "entry": entry,
            "words": words,
            "tone": tone,
            "links": self.links(request),
            "stages": way,
            "total_ms": max(entry.latency_ms, way[-1].end if way else 0, 1),
            "marks": _marks(entry.latency_ms),
            "settled": settled,
            "unused": None if entry.reserved_tokens is None else entry.reserved_tokens - settled,
            "rate": decode_rate(entry),
            "reason": reason(entry, self._currency),
            "help": explain(entry),
            "limit_shown": None
            if limit is None
            else {
                name: amount(limit.name, getattr(limit, name), self._currency)
                for name in ("value", "needed", "remaining")
            },
            "limit_title": limit_title,
            "answer_ids": [entry.request_id.replace("req_", prefix, 1) for prefix in ("chatcmpl-", "cmpl-")],
            "trace": None if self._trace_url is None else trace_link(self._trace_url, entry),
            "around": {
                "tenant": entry.tenant,
                "since": as_field(entry.at - AROUND),
                "until": as_field(entry.at + AROUND + timedelta(seconds=1)),
            },
        }


def trace_link(template: str, entry: LogEntry) -> str:
    """Return the URL of the request's trace. The times, in Unix milliseconds, are AROUND before and after it."""
    whole = timedelta(milliseconds=entry.latency_ms)
    values = {"request_id": entry.request_id}
    for name, at in (("since", entry.at - whole - AROUND), ("until", entry.at + whole + AROUND)):
        values[name] = str(round(1000 * at.timestamp()))
    return re.sub(r"\{(\w+)\}", lambda match: quote(values[match[1]], safe=""), template)


def _table(request: web.Request, page: LogPage, columns: Sequence[Column]) -> Table:
    is_first = not request.query.get("after")
    return Table(
        "requests",
        columns,
        rows=page.entries,
        next_link=None if page.next is None else link(request, after=page.next, live=None),
        previous_link=None if is_first else link(request, after=None),
        previous_title="Newest",
        formats=("json",),
    )


def _marks(latency_ms: int) -> list[int]:
    """Return three to six round times within a request's duration, for the scale of its waterfall."""
    if latency_ms < 4:
        return []
    rough = latency_ms / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = int(next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)) or 1
    return list(range(0, latency_ms + 1, step))
