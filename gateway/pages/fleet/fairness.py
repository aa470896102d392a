"""`/admin/fairness` and `/admin/api/fairness`: the tenants' shares against their weights, waits and preemptions."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from gateway.api.admin.fairness import describe_fairness, largest, share_curve
from gateway.api.requests.fields import json_response
from gateway.errors import BadRequest
from gateway.fleet.queueing.fairness import Fairness, TenantFairness
from gateway.pages.fleet.first_tokens import FirstTokens
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.tables import ROWS, Column, csv_response, fill, read_second, read_table
from gateway.records.activity.figures import Percentiles
from gateway.records.activity.report import MAX_GROUPS

STATES = {"waiting": "Waits", "behind": "Waits, below its share"}

COLUMNS = (
    Column("tenant", "Tenant"),
    Column("weight", "Weight", numeric=True),
    Column("now", "Share now", value=lambda row: row.now.share, hint="Part of the service of the last minute"),
    Column("due", "Due now", numeric=True, value=lambda row: row.now.due, hint="Its weight's part of that service"),
    Column("hour", "Share, 1 h", numeric=True, value=lambda row: row.hour.share, hint="Part of the last hour"),
    Column("due_hour", "Due, 1 h", numeric=True, value=lambda row: row.hour.due),
    Column("waiting", "Waiting", numeric=True, hint="Requests that wait now, in this process and on the engines"),
    Column("waiting_on_engines", "On engines", numeric=True,
           hint="Those of them that wait in the engines' queues, of all gateways; none: no engine reports it"),
    Column("oldest", "Longest", numeric=True, hint="Longest wait so far of one of them, in the queue that it is in"),
    Column("p50", "Wait p50", numeric=True, hint="Waits that ended within an hour, in the gateway and on our engines"),
    Column("p95", "Wait p95", numeric=True),
    Column("service", "Counter", numeric=True, hint="Tokens of service per weight, over all gateway processes"),
)  # fmt: skip
TTFT_HINT = f"First tokens of its streams in the last hour; shown for the {MAX_GROUPS} tenants with most requests"
PREEMPTIONS = (
    Column("tenant", "Requests of"),
    Column("by", "Gave way to"),
    Column("number", "Times", numeric=True),
    Column("engine", "Engine"),
)


class FairnessPages:
    """Page and JSON route, from the memory of this gateway process. The page also has times to first token."""

    def __init__(self, *, frame: Frame, fairness: Fairness, first_tokens: FirstTokens) -> None:
        self._frame = frame
        self._fairness = fairness
        self._first_tokens = first_tokens

    async def page(self, request: web.Request) -> web.Response:
        ttft = await self._first_tokens.by_tenant()
        columns = _columns(ttft)
        table = read_table(request, "fairness", columns, "-now")
        preemptions = read_second(request, "preemptions", PREEMPTIONS, "-number")
        state, wanted = request.query.get("state", ""), request.query.get("q", "").strip().lower()
        if state and state not in STATES:
            raise BadRequest(f"state: expected one of {', '.join(STATES)}.", param="state")
        rows = self._fairness.tenants()
        kept = [row for row in rows if wanted in row.tenant.lower() and _is(row, state)]
        if request.query.get("format") == "csv":
            if request.query.get("table") == "preemptions":
                return csv_response("preemptions", PREEMPTIONS, self._fairness.preemptions())
            return csv_response("fairness", columns, kept)
        p50, p95 = self._fairness.wait_percentiles()
        return self._frame.render(
            request,
            "fairness.html",
            title="Fairness",
            table=fill(table, kept),
            states=STATES,
            num=len(rows),
            jain=self._fairness.jain(),
            jain_hour=self._fairness.jain_hour(),
            num_waiting=sum(row.waiting > 0 for row in rows),
            num_behind=sum(row.is_behind for row in rows),
            waits=self._fairness.waits(),
            p50=p50,
            p95=p95,
            ttft=ttft,
            charts=self._charts(),
            preemptions=fill(preemptions, self._fairness.preemptions()[:ROWS]),
            since=datetime.fromtimestamp(self._fairness.since, UTC),
            process=os.getpid(),
        )

    async def describe(self, _: web.Request) -> web.Response:
        """Return the page's figures as JSON."""
        return json_response(describe_fairness(self._fairness))

    def _charts(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Return (id, title, data) of the charts."""
        points = list(self._fairness.points)
        times, names = [point.at for point in points], largest(self._fairness)
        series = [
            {"name": self._fairness.name(each), "values": [_percent(value) for value in share_curve(points, each)]}
            for each in names
        ]
        if len(self._fairness.hour.service) > len(names):
            rest = [
                None if point.total <= 0 else 1 - sum(point.service.get(each, 0.0) for each in names) / point.total
                for point in points
            ]
            series.append({"name": "others", "values": [_percent(value) for value in rest]})
        index = [None if point.jain is None else round(point.jain, 3) for point in points]
        return [
            ("shares", "Share of the service", {"times": times, "unit": "%", "series": series, "stacked": True}),
            (
                "jain",
                "Jain's index of the tenants that wait",
                {"times": times, "unit": "1 is fair", "series": [{"name": "index", "values": index}], "stacked": False},
            ),
        ]


def _columns(ttft: Mapping[str, Percentiles]) -> tuple[Column, ...]:
    """Return the columns with those of the time to first token, in ms. ttft: by the tenant's name."""

    def column(name: str) -> Column:
        return Column(
            *(f"ttft_{name}_ms", f"TTFT {name}"),
            numeric=True,
            value=lambda row: getattr(ttft[row.tenant], name) if row.tenant in ttft else None,
            hint=TTFT_HINT,
        )

    return (*COLUMNS, column("p50"), column("p95"))


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * max(0.0, value), 1)


def _is(row: TenantFairness, state: str) -> bool:
    if state == "behind":
        return row.is_behind
    return not state or row.waiting > 0
