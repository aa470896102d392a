"""`/console/usage`: the tenant's tokens and cost by time, model, key or end user, and its files."""

from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from aiohttp import web

from gateway.access.auth import TenantPrincipal
from gateway.api.reports.usage_export import FORMATS, fields_of, read_format, send_rows
from gateway.api.scopes import PRINCIPAL
from gateway.errors import BadRequest
from gateway.pages.console.access import Console, ConsolePages, needs
from gateway.pages.frame.frame import link
from gateway.pages.widgets import periods
from gateway.pages.widgets.periods import (
    LAST_MONTH,
    LENGTHS,
    MONTH,
    PagePeriod,
    bounds_before,
    range_text,
    read_period,
    segments_of,
    whole,
)
from gateway.pages.widgets.tables import ROWS, Column, Table, fill, read_table
from gateway.records.usage.ranked_groups import Part
from gateway.records.usage.ranking import UsageRanking
from gateway.records.usage.report import UsagePage, UsageSums
from gateway.records.usage.rows import UsageFilter
from gateway.sharing.concurrency import ConcurrencyLimiter
from wire.money import MICRO_UNITS

QUERY = (*periods.QUERY[:3], "by", "sort", "page", "format")
PERIODS = ("24h", "7d", "30d", MONTH, LAST_MONTH)
BY = {"day": "Day", "hour": "Hour", "month": "Month", "model": "Model", "key": "Key", "end_user": "End user"}
TIMES = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "month": "%B %Y"}
# Groups whose change since the period before is shown, and the field that identifies one.
COMPARED = {"model": "model", "key": "key_id", "end_user": "end_user"}
# Most rows of the page, whose sums are of all rows, and of a file, which is refused beyond it.
MAX_ROWS, MAX_FILE_ROWS = 5000, 20_000
# Rows of a file that are encoded at a time, a few ms of the event loop; files that are sent at once, one of a tenant.
AT_ONCE, FILES = 200, 8
# Longest period whose chart has a point for each hour.
HOURLY = timedelta(days=3)
MEASURES = ("cost", "requests", "prompt_tokens", "cached_tokens", "completion_tokens")
SUMS = (
    Column("requests", "Requests", numeric=True),
    Column("prompt_tokens", "In", numeric=True, hint="Prompt tokens, cached ones included"),
    Column("cached_tokens", "Cached", numeric=True, hint="Prompt tokens from the cache"),
    Column("completion_tokens", "Out", numeric=True, hint="Tokens of answers"),
    Column("cost", "Cost", numeric=True),
)
CHANGE = Column("change", "Change", numeric=True, sortable=False, hint="Of the cost, since the period before")
GROUP_COLUMNS = {
    **{by: Column(by, f"{BY[by]} (UTC)") for by in TIMES},
    "model": Column("model", "Model"),
    "key": Column("key", "Key", value=lambda row: row.key or row.key_id),
    "end_user": Column("end_user", "End user"),
}


class ConsoleUsage(ConsolePages):
    """Page of usage and cost. It reads only the end users that it shows, because their number has no bound."""

    def __init__(self, console: Console, ranking: UsageRanking) -> None:
        super().__init__(console)
        self._ranking = ranking
        self._files = ConcurrencyLimiter(FILES)

    @needs("usage")
    async def show(self, request: web.Request) -> web.StreamResponse:
        """Return the page, or a file of its groups. An error of the query is shown above the table."""
        principal, now = request[PRINCIPAL], datetime.now(UTC)
        errors: dict[str, str] = {}
        by, span = "day", PagePeriod(MONTH, periods.month_start(now), now)
        try:
            by = _read_group(request)
            span = whole(read_period(request, MONTH, now), by_day=_is_by_day(principal, by))
            if request.query.get("format"):
                return await self._file(request, principal, by, span)
            context = await self._figures(request, principal, by, span)
        except BadRequest as error:
            errors[error.param or ""] = error.message
            by = "day"
            context = await self._figures(request, principal, by, span)
        return await self.console.frame.render_long(
            request,
            "console/usage.html",
            title="Usage and cost",
            status=400 if errors else 200,
            errors=errors,
            by=by,
            by_title=BY[by].lower(),
            time_format=TIMES.get(by),
            groups=[(title, link(request, by=name, sort=None), name == by) for name, title in BY.items()],
            span=span,
            periods=segments_of(request, span, PERIODS),
            principal=principal,
            by_day=_is_by_day(principal, by) and span.name in LENGTHS,
            before_title=f"the period before, {range_text(*bounds_before(span))}",
            **context,
        )

    async def _figures(
        self, request: web.Request, principal: TenantPrincipal, by: str, span: PagePeriod
    ) -> dict[str, Any]:
        """Return the table, the tiles' sums with their changes, and the charts. Raises BadRequest."""
        columns = (GROUP_COLUMNS[by], *SUMS, *((CHANGE,) if by in COMPARED else ()))
        step = by if by in TIMES else "hour" if span.until - span.since <= HOURLY else "day"
        since, until = bounds_before(span)
        earlier = PagePeriod("", since, until)
        table = read_table(request, "usage", columns, by if by in TIMES else "-cost")
        table.csv, table.formats = False, tuple(FORMATS)
        own = () if by == "end_user" else (by,)
        async with self.console.reads.place(principal.tenant.id):
            found = await self._page(principal, own, span)
            steps = found if by == step else await self._page(principal, (step,), span)
            before = await self._page(principal, own if by in COMPARED else (), earlier)
            lacks_usage = False
            if by == "end_user":
                costs, lacks_usage = await self._rank(principal, table, span, earlier)
            else:
                fill(table, found.groups)
                costs = {getattr(row, COMPARED[by]): row.cost for row in before.groups} if by in COMPARED else {}

        def before_of(row: Any) -> int | None:
            return costs.get(getattr(row, COMPARED[by]), 0)

        return {
            "table": table,
            "total": found.total,
            "changes": {name: _change(found.total[name], before.total[name]) for name in MEASURES},
            "change_of": lambda row: _change(row.cost, before_of(row)),
            "is_new": lambda row: bool(row.cost) and before_of(row) == 0,
            "has_change": by in COMPARED,
            "is_partial": found.next is not None,
            "lacks_usage": lacks_usage,
            "charts": _charts(steps.groups, step, self.console.currency),
        }

    async def _rank(
        self, principal: TenantPrincipal, table: Table, span: PagePeriod, earlier: PagePeriod
    ) -> tuple[dict[str | None, int | None], bool]:
        """Read the end users of the table's page. Raises BadRequest.

        Returns their costs in the period before, and whether retention has removed usage of the period.
        """
        criteria = UsageFilter(tenant_id=principal.tenant.id, models=principal.allowed_models)
        part = Part(criteria=criteria, since=span.since, until=_end(span))
        order = "name" if table.sort == "end_user" else table.sort
        page = await self._ranking.groups(
            part, "end_user", order, descending=table.descending, offset=table.offset, limit=ROWS
        )
        table.rows, table.total, table.has_more = page.groups, page.number, page.has_more
        before = Part(criteria=criteria, since=earlier.since, until=earlier.until)
        groups = await self._ranking.earlier(before, "end_user", page.groups, "cost")
        return {group.end_user: group.before for group in groups}, page.lacks_usage

    async def _file(
        self, request: web.Request, principal: TenantPrincipal, by: str, span: PagePeriod
    ) -> web.StreamResponse:
        """Send the period's groups. They are read first, so that a slow client holds no connection of the database.

        Raises BadRequest.
        """
        form = read_format(request)
        async with self._files.place(principal.tenant.id):
            async with self.console.reads.place(principal.tenant.id):
                found = await self._page(principal, (by,), span, MAX_FILE_ROWS)
            if found.next is not None:
                raise BadRequest(f"until: expected a period with at most {MAX_FILE_ROWS:,} rows.", param="until")
            parts = _parts(found.groups)
            return await send_rows(request, f"usage-by-{by}.{form}", fields_of((by,)), parts, self.console.currency)

    async def _page(
        self, principal: TenantPrincipal, group_by: Sequence[str], span: PagePeriod, limit: int = MAX_ROWS
    ) -> UsagePage:
        """Return the sums of the models that the key may use. Raises BadRequest."""
        return await self.console.records.report.page(
            group_by,
            tenant_id=principal.tenant.id,
            models=principal.allowed_models,
            since=span.since,
            until=_end(span),
            limit=limit,
        )


def _end(span: PagePeriod) -> datetime | None:
    return None if span.is_open else span.until


async def _parts(groups: Sequence[UsageSums]) -> AsyncGenerator[list[dict[str, Any]]]:
    for first in range(0, len(groups), AT_ONCE):
        yield [msgspec.structs.asdict(sums) for sums in groups[first : first + AT_ONCE]]


def _read_group(request: web.Request) -> str:
    by = request.query.get("by") or "day"
    if by not in BY:
        raise BadRequest(f"by: expected one of {', '.join(BY)}.", param="by")
    return by


def _is_by_day(principal: TenantPrincipal, by: str) -> bool:
    """Return whether the groups have sums by day only."""
    return by == "end_user" and principal.allowed_models is None


def _change(now: int, before: int | None) -> float | None:
    """Return the relative difference; None without a value before."""
    return None if not before else (now - before) / before


def _charts(rows: Sequence[UsageSums], step: str, currency: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (id, title, data) of the charts by step; none for a single one."""
    if len(rows) < 2:
        return []
    times = [int(getattr(row, step).timestamp()) for row in rows]

    def bars(unit: str, series: dict[str, list[float]]) -> dict[str, Any]:
        shown = [{"name": name, "values": values} for name, values in series.items()]
        return {"times": times, "unit": unit, "series": shown, "stacked": False, "kind": "bar"}

    cost = {"Cost": [round(row.cost / MICRO_UNITS, 6) for row in rows]}
    tokens: dict[str, list[float]] = {
        "In": [row.prompt_tokens for row in rows],
        "Out": [row.completion_tokens for row in rows],
    }
    lines = bars("", tokens) | {"kind": "line"}
    return [("cost", f"Cost by {step}", bars(currency, cost)), ("tokens", f"Tokens by {step}", lines)]
