"""`/console/usage`: the tenant's tokens and cost by day, model or key."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from gateway.access.auth import TenantPrincipal
from gateway.access.scopes import PRINCIPAL
from gateway.errors import BadRequest
from gateway.pages.console.access import ConsolePages, needs
from gateway.pages.frame.frame import link
from gateway.pages.parts import periods
from gateway.pages.parts.periods import LAST_MONTH, MONTH, PagePeriod, read_period, segments_of
from gateway.pages.parts.tables import Column, csv_response, fill, read_table
from gateway.records.money.prices import MICRO_UNITS, exact_money
from gateway.records.money.usage_report import UsagePage, UsageSums

QUERY = (*periods.QUERY[:3], "by", "sort", "page", "format")
PERIODS = ("24h", "7d", "30d", MONTH, LAST_MONTH)
BY = {"day": "Day", "model": "Model", "key": "Key"}
# Most rows; the sums are of all of them.
MAX_ROWS = 5000
SUMS = (
    Column("requests", "Requests", numeric=True),
    Column("prompt_tokens", "In", numeric=True, hint="Prompt tokens, cached ones included"),
    Column("cached_tokens", "Cached", numeric=True, hint="Prompt tokens from the cache"),
    Column("completion_tokens", "Out", numeric=True, hint="Tokens of answers"),
    Column("cost", "Cost", numeric=True),
)
GROUP_COLUMNS = {
    "day": Column("day", "Day (UTC)", value=lambda row: row.day.strftime("%Y-%m-%d")),
    "model": Column("model", "Model"),
    "key": Column("key", "Key", value=lambda row: row.key or row.key_id),
}


class ConsoleUsage(ConsolePages):
    """Page of usage and cost."""

    @needs("usage")
    async def show(self, request: web.Request) -> web.StreamResponse:
        """Return the page, or its table as CSV. An error of the period is shown above the table."""
        principal, now = request[PRINCIPAL], datetime.now(UTC)
        errors: dict[str, str] = {}
        by, span = "day", PagePeriod(MONTH, periods.month_start(now), now)
        try:
            by, span = _read_group(request), read_period(request, MONTH, now)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        columns = (GROUP_COLUMNS[by], *SUMS)
        table = read_table(request, "usage", columns, "day" if by == "day" else "-cost")
        async with self.console.reads.turn(principal.tenant.id):
            found = await self._page(principal, by, span)
            days = found if by == "day" else await self._page(principal, "day", span)
        if request.query.get("format") == "csv" and not errors:
            return csv_response(f"usage-by-{by}", _csv_columns(by, self.console.currency), found.groups)
        return self.console.frame.render(
            request,
            "console/usage.html",
            title="Usage and cost",
            status=400 if errors else 200,
            errors=errors,
            by=by,
            groups=[(title, link(request, by=name, sort=None), name == by) for name, title in BY.items()],
            span=span,
            periods=segments_of(request, span, PERIODS),
            table=fill(table, found.groups),
            total=found.total,
            is_partial=found.next is not None,
            principal=principal,
            charts=_charts(days.groups, self.console.currency),
        )

    async def _page(self, principal: TenantPrincipal, by: str, span: PagePeriod) -> UsagePage:
        """Return the sums of the models that the key may use."""
        return await self.console.records.report.page(
            (by,),
            tenant_id=principal.tenant.id,
            models=principal.allowed_models,
            since=span.since,
            until=span.until,
            limit=MAX_ROWS,
        )


def _read_group(request: web.Request) -> str:
    by = request.query.get("by") or "day"
    if by not in BY:
        raise BadRequest(f"by: expected one of {', '.join(BY)}.", param="by")
    return by


def _csv_columns(by: str, currency: str) -> list[Column]:
    names = [GROUP_COLUMNS[by], *([Column("key_id", "Key's id")] if by == "key" else ())]
    money = [
        Column("cost", "Cost", value=lambda row: exact_money(row.cost)),
        Column("currency", "Currency", value=lambda _: currency),
    ]
    return [*names, *SUMS[:-1], *money]


def _charts(days: Sequence[UsageSums], currency: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (id, title, data) of the charts by day; none for a single day."""
    if len(days) < 2:
        return []
    times = [int(row.day.timestamp()) for row in days if row.day is not None]

    def bars(unit: str, series: dict[str, list[float]]) -> dict[str, Any]:
        shown = [{"name": name, "values": values} for name, values in series.items()]
        return {"times": times, "unit": unit, "series": shown, "stacked": False, "kind": "bar"}

    cost = {"Cost": [round(row.cost / MICRO_UNITS, 6) for row in days]}
    tokens: dict[str, list[float]] = {
        "In": [row.prompt_tokens for row in days],
        "Out": [row.completion_tokens for row in days],
    }
    lines = bars("", tokens) | {"kind": "line"}
    return [("cost", "Cost by day", bars(currency, cost)), ("tokens", "Tokens by day", lines)]
