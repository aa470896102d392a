"""Page `/admin/usage`: usage and cost of a period by group, with curves and a comparison with the period before."""

from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from aiohttp import web

from gateway.api.reports.usage_export import UsageExport, read_usage_filter
from gateway.errors import BadRequest
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets import periods
from gateway.pages.widgets.links import Links
from gateway.pages.widgets.periods import (
    LENGTHS,
    MONTH,
    TITLES,
    PagePeriod,
    as_field,
    bounds_before,
    range_text,
    read_period,
    segments_of,
    whole,
)
from gateway.pages.widgets.tables import ROWS, Column, read_table
from gateway.records.concurrent_reads import together
from gateway.records.usage.ranked_groups import (
    CURVES,
    GROUPS,
    MEASURES,
    Curves,
    GroupBy,
    Measure,
    Part,
    RankedGroup,
    Step,
)
from gateway.records.usage.ranking import UsageRanking
from gateway.records.usage.rows import can_sum_end_users
from gateway.records.usage.steps import by_day, total_of
from wire.money import MICRO_UNITS

QUERY = (*periods.QUERY, "group_by", "measure", "tenant", "model", "key", "sort", "page", "format")
PERIODS = ("24h", "7d", "30d", "month", "last_month")
GROUP_TITLES: dict[GroupBy, str] = {
    "tenant": "Tenant",
    "model": "Model",
    "key": "Key",
    "end_user": "End user",
    "hour": "Hour",
    "day": "Day",
    "month": "Month",
}
MEASURE_TITLES: dict[Measure, str] = {"cost": "Cost", "tokens": "Tokens", "requests": "Requests"}
# Groupings that the export offers, beside that of the page.
EXPORTS = (
    ("tenant", "tenant"),
    ("tenant,day", "tenant and day"),
    ("tenant,month", "tenant and month"),
    ("tenant,hour", "tenant and hour"),
    ("tenant,model", "tenant and model"),
    ("tenant,model,day", "tenant, model and day"),
    ("tenant,key", "tenant and key"),
    ("tenant,key,day", "tenant, key and day"),
    ("tenant,end_user", "tenant and end user"),
)
# Longest period with a point per hour, and with a point per day.
HOURS, DAYS = timedelta(days=3), timedelta(days=120)
# Maximum requests of a period whose chart by end user has a point per hour: it reads the requests' rows.
MAX_HOURLY = 20_000
_Choice = TypeVar("_Choice", bound=str)


class UsagePages:
    """Page of usage, and its export. currency: the costs' currency."""

    def __init__(self, frame: Frame, ranking: UsageRanking, export: UsageExport, currency: str) -> None:
        self._frame = frame
        self._ranking = ranking
        self._export = export
        self._currency = currency

    async def export(self, request: web.Request) -> web.StreamResponse:
        """Return the file, for the form of the page."""
        return await self._export.get(request)

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Return the page. An error of the period or of a filter is shown at its field."""
        now = datetime.now(UTC)
        try:
            context = await self._figures(request, now)
        except BadRequest as error:
            span, errors = PagePeriod("", now - timedelta(days=1), now), {error.param or "": error.message}
            context = {"span": span, "errors": errors, "group_by": "tenant", "measure": "cost", "table": None}
        return await self._frame.render_long(
            request,
            "usage.html",
            title="Usage and cost",
            status=400 if context["errors"] else 200,
            periods=segments_of(request, context["span"], PERIODS),
            group_titles=GROUP_TITLES,
            measure_titles=MEASURE_TITLES,
            exports=EXPORTS,
            links=Links(request),
            bounds={name: as_field(getattr(context["span"], name)) for name in ("since", "until")},
            **context,
        )

    async def _figures(self, request: web.Request, now: datetime) -> dict[str, Any]:
        group_by = _choice(request, "group_by", GROUPS)
        measure = _choice(request, "measure", MEASURES)
        criteria = read_usage_filter(request)
        is_by_day = can_sum_end_users((group_by,), criteria)
        span = whole(read_period(request, MONTH, now), by_day=is_by_day)
        part = Part(criteria=criteria, since=span.since, until=None if span.is_open else span.until)
        bounds = bounds_before(span)
        earlier = Part(criteria=criteria, since=bounds[0], until=bounds[1])
        by_time = group_by in ("hour", "day", "month")
        default = "-name" if by_time else f"-{measure}"
        table = read_table(request, "usage", _columns(group_by, by_time=by_time), default)
        page = self._ranking.groups(
            part, group_by, table.sort, descending=table.descending, offset=table.offset, limit=ROWS
        )
        step = _step(span, group_by)
        ranking, steps, before = await together(page, self._ranking.steps(part, step), self._ranking.total(earlier))
        total = total_of(steps)
        leaders = ranking.first
        if not by_time and (table.sort != measure or not table.descending or leaders is None):
            leaders = (await self._ranking.groups(part, group_by, measure, limit=CURVES)).groups
        if group_by == "end_user" and step == "hour" and total["requests"] > MAX_HOURLY:
            # End users have sums by day only.
            step, steps = "day", by_day(steps)
        curves, table.rows = await together(
            self._ranking.curves(part, group_by, leaders or (), measure, step, steps),
            self._ranking.earlier(earlier, group_by, ranking.groups, measure),
        )
        table.total, table.csv = ranking.number, False
        table.has_more = ranking.has_more
        return {
            "span": span,
            "errors": {},
            "group_by": group_by,
            "by_time": by_time,
            "measure": measure,
            "table": table,
            "total": total,
            "before": before,
            "changes": {name: _change(value, before[name]) for name, value in total.items()},
            "before_title": f"the period before, {range_text(*bounds_before(span))}",
            "chart": _chart(curves, group_by, measure, step, self._currency),
            "step": step,
            "by_day": is_by_day and span.name in LENGTHS,
            "is_partial": ranking.is_partial,
            "lacks_usage": ranking.lacks_usage,
            "measured": lambda group: getattr(group, measure),
            "change_of": lambda group: _change(getattr(group, measure), group.before),
            "period_title": TITLES.get(span.name, "Custom period"),
        }


def _columns(group_by: GroupBy, *, by_time: bool) -> tuple[Column, ...]:
    named = Column("name", GROUP_TITLES[group_by])
    owner = () if by_time or group_by == "tenant" else (Column("tenant", "Tenant", sortable=False),)
    change = (
        () if by_time else (Column("before", "Change", numeric=True, sortable=False, hint="Since the period before"),)
    )
    return (
        named,
        *owner,
        Column("requests", "Requests", numeric=True),
        Column("cost", "Cost", numeric=True),
        *change,
        Column("tokens", "Tokens", numeric=True, hint="In and out"),
        Column("prompt_tokens", "In", numeric=True, hint="Prompt tokens"),
        Column("cached_tokens", "Cached", numeric=True, hint="Prompt tokens that came from an engine's cache"),
        Column("completion_tokens", "Out", numeric=True, hint="Tokens of the answers"),
    )


def _choice(request: web.Request, name: str, choices: tuple[_Choice, ...]) -> _Choice:
    given = request.query.get(name) or choices[0]
    for choice in choices:
        if given == choice:
            return choice
    raise BadRequest(f"{name}: expected one of {', '.join(choices)}.", param=name)


def _step(span: PagePeriod, group_by: GroupBy) -> Step:
    """Return the chart's step: the table's, if it is one of time and the period has more than one."""
    first, last = span.since.astimezone(UTC), (span.until - timedelta.resolution).astimezone(UTC)
    if group_by == "hour" or (group_by == "day" and first.date() != last.date()):
        return group_by
    if group_by == "month" and (first.year, first.month) != (last.year, last.month):
        return group_by
    length = span.until - span.since
    return "hour" if length <= HOURS else "day" if length <= DAYS else "month"


def _change(now: int, before: int | None) -> float | None:
    return None if not before else (now - before) / before


def _chart(curves: Curves, group_by: GroupBy, measure: Measure, step: Step, currency: str) -> dict[str, Any]:
    """Return the chart: a bar for each step from the first with usage to the last, stacked by group."""
    starts = _between(curves.starts, step)
    at = {start: i for i, start in enumerate(curves.starts)}
    unit = MICRO_UNITS if measure == "cost" else 1

    def spread(values: list[int]) -> list[float]:
        return [values[at[start]] / unit if start in at else 0 for start in starts]

    series = [{"name": _title(group, group_by), "values": spread(values)} for group, values in curves.groups]
    parts = [values for _, values in curves.groups]
    rest = [total - sum(part[i] for part in parts) for i, total in enumerate(curves.total)]
    if any(rest):
        series.append({"name": "others" if series else MEASURE_TITLES[measure], "values": spread(rest)})
    return {
        "times": [int(start.timestamp()) for start in starts],
        "series": series,
        "unit": currency if measure == "cost" else measure,
        "stacked": True,
        "kind": "bar",
    }


def _title(group: RankedGroup, group_by: GroupBy) -> str:
    return group.name if group_by == "tenant" else f"{group.tenant} / {group.name}"


def _between(starts: list[datetime], step: Step) -> list[datetime]:
    """Return every start from the first to the last, so that a step without usage has no bar."""
    if not starts:
        return []
    found: list[datetime] = []
    at = starts[0]
    while at <= starts[-1] and len(found) < 5000:
        found.append(at)
        if step == "month":
            at = periods.month_start(at + timedelta(days=32))
        else:
            at += timedelta(hours=1) if step == "hour" else timedelta(days=1)
    return found
