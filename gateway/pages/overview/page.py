"""`/admin/`: what happens now, compared with the period before, and what needs attention."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from aiohttp import web

from gateway.access.sessions import VISITOR
from gateway.api.requests.fields import json_response
from gateway.errors import BadRequest, Unavailable
from gateway.fleet.history import History
from gateway.pages.frame.filters import short
from gateway.pages.frame.frame import Frame
from gateway.pages.frame.navigation import VIEWER
from gateway.pages.frame.strip import Strip
from gateway.pages.overview.attention import NeedList, Needs, counted
from gateway.pages.widgets.charts import means
from gateway.pages.widgets.limit_titles import code_title, reason_title
from gateway.pages.widgets.periods import read_period, segments_of
from gateway.records.activity.figures import ActivityReport, Curve, Percentiles, Refusals
from gateway.records.activity.report import Activity
from gateway.records.concurrent_reads import together
from gateway.records.periods import DAY, HOUR, MINUTE
from wire.money import MICRO_UNITS

PERIODS = ("1h", "24h", "7d", "30d")
GROUPS = ("tenant", "model", "engine")
# Points of a sparkline.
SPARK_POINTS = 40
# Lowest rate per second that is shown.
MIN_RATE = 0.1
# Reasons of failures with a series of their own.
MAX_REASONS = 8
# Titles of a tile and of the chart of the same times.
TTFT_TITLE, LATENCY_TITLE = "Time to first token", "Time of a whole answer"
QUANTILE_NAMES = ("p50", "p95", "p99")


class Quantile(NamedTuple):
    """Percentile of a time in ms, such as `p95`; None without a request that has it. change: as in `Figures`."""

    name: str
    value: float | None
    change: float | None


class Figures(NamedTuple):
    """Figures of a period for the tiles, and their relative changes from the period before; None without one.

    prompt, cached, tokens: tokens in, those of them from a cache, and tokens out. rates: texts beside `requests` and
    `tokens`. times: (title, percentiles) of the first token and of a whole answer.
    """

    requests: int
    prompt: int
    cached: int
    tokens: int
    rates: dict[str, str]
    errors: float | None
    limited: float | None
    times: Sequence[tuple[str, Sequence[Quantile]]]
    cost: int
    changes: dict[str, float | None]


class Overview:
    """The page. It shows the engines, the queue and the strip also while the database is away."""

    def __init__(self, *, frame: Frame, strip: Strip, activity: Activity, needs: Needs, history: History) -> None:
        self._frame = frame
        self._strip = strip
        self._activity = activity
        self._needs = needs
        self._history = history

    async def redirect(self, _: web.Request) -> web.Response:
        """Redirect `/admin` to the page, whose links are relative to `/admin/`."""
        return web.Response(status=308, headers={"Location": "/admin/"})

    async def attention(self, _: web.Request) -> web.Response:
        """Return the list "Needs attention" as JSON."""
        found = await self._needs.entries(self._strip.read())
        return json_response(NeedList(data=[entry.described() for entry in found]))

    async def page(self, request: web.Request) -> web.Response:
        now = datetime.now(UTC)
        period, group = read_period(request, "24h", now), request.query.get("by", "tenant")
        if group not in GROUPS:
            raise BadRequest(f"by: expected one of {', '.join(GROUPS)}.", param="by")
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        missing, report, today = None, None, None
        try:
            report, today = await together(
                self._activity.report(since=period.since, until=period.until, group_by=group),  # type: ignore[arg-type]
                self._activity.cost_of_day(midnight),
            )
        except Unavailable as error:
            missing = error.message
        status = self._strip.read()
        return await self._frame.render_long(
            request,
            "overview.html",
            title="Overview",
            missing=missing,
            period=period,
            periods=segments_of(request, period, PERIODS),
            group=group,
            report=report,
            figures=None if report is None else figures(report),
            today=today,
            charts=[] if report is None else charts(report, group),
            sparks={} if report is None else _sparks(report),
            utilisation=self._history.utilisation(int(now.timestamp())),
            needs=await self._needs.entries(status, may_bill=request[VISITOR].role != VIEWER),
        )


def figures(report: ActivityReport) -> Figures:
    """Return the figures of the tiles."""
    seconds = max(1.0, (report.until - report.since).total_seconds())
    now, before = report.total, report.before
    attempts, attempts_before = (_attempts(report, is_before=flag) for flag in (False, True))
    errors, errors_before = (_count_refusals(report.refusals, 500, flag) for flag in (False, True))
    limited, limited_before = (_count_refusals(report.refusals, 429, flag) for flag in (False, True))
    changes = {
        "requests": _change(now.requests, before.requests),
        "prompt": _change(now.prompt_tokens, before.prompt_tokens),
        "cached": _change(now.cached_tokens, before.cached_tokens),
        "tokens": _change(now.completion_tokens, before.completion_tokens),
        "cost": _change(now.cost, before.cost),
        "errors": _change(_ratio(errors, attempts), _ratio(errors_before, attempts_before)),
        "limited": _change(_ratio(limited, attempts), _ratio(limited_before, attempts_before)),
    }
    return Figures(
        requests=now.requests,
        prompt=now.prompt_tokens,
        cached=now.cached_tokens,
        tokens=now.completion_tokens,
        rates={
            "requests": _rate_text(now.requests / seconds),
            "tokens": _rate_text(now.completion_tokens / seconds),
        },
        errors=_ratio(errors, attempts),
        limited=_ratio(limited, attempts),
        times=[
            (TTFT_TITLE, _quantiles(now.ttft, before.ttft)),
            (LATENCY_TITLE, _quantiles(now.latency, before.latency)),
        ],
        cost=now.cost,
        changes=changes,
    )


def charts(report: ActivityReport, group: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (id, title, data) of the charts."""
    times = [int(start.timestamp()) for start in report.starts]
    step = report.step

    def stacked(unit: str, values: Any) -> dict[str, Any]:
        named = [
            (f"{each.tenant}/{each.name}" if each.tenant else each.name or "none", each.curve) for each in report.groups
        ]
        if report.others is not None:
            named.append((report.rest_title, report.others))
        series = [{"name": name, "values": values(curve)} for name, curve in named]
        return {"times": times, "unit": unit, "series": series, "stacked": True}

    def per_second(name: str) -> Any:
        return lambda curve: [round(value / step, 6) for value in getattr(curve, name)]

    def costs(curve: Curve) -> list[float]:
        return [round(value / MICRO_UNITS, 6) for value in curve.cost]

    def lines(values: Sequence[Percentiles | None]) -> dict[str, Any]:
        series = [
            {"name": name, "values": [None if each is None else round(getattr(each, name)) for each in values]}
            for name in QUANTILE_NAMES
        ]
        return {"times": times, "unit": "ms", "series": series, "stacked": False}

    by = f"by {group}"
    unit = f"requests per {_step_text(step)}"
    failures = {"times": times, "unit": unit, "series": _failures(report), "stacked": True}
    return [
        ("requests", f"Requests {by}", stacked("per s", per_second("requests"))),
        ("tokens", f"Tokens out {by}", stacked("per s", per_second("completion_tokens"))),
        ("cost", f"Cost {by}", stacked("currency", costs)),
        ("ttft", TTFT_TITLE, lines(report.times.ttft)),
        ("failed", "Errors and refusals by reason", failures),
        ("latency", LATENCY_TITLE, lines(report.times.latency)),
    ]


def _failures(report: ActivityReport) -> list[dict[str, Any]]:
    """Return a series for each of the first MAX_REASONS reasons of failed requests, and one for the others.

    A name has the code and the status only if its limit or code has several: requests that an engine refused keep the
    engine's code.
    """
    failed = [each for each in report.refusals if each.requests]
    statuses = Counter((each.code, each.limit) for each in failed)
    codes: dict[str, set[str]] = {}
    for each in failed:
        codes.setdefault(reason_title(each.code, each.limit), set()).add(each.code)

    def name(each: Refusals) -> str:
        title = reason_title(each.code, each.limit)
        details = [code_title(each.code)] if len(codes[title]) > 1 else []
        if statuses[each.code, each.limit] > 1:
            details.append(str(each.status) if each.status else "after admission")
        return f"{title} ({', '.join(details)})" if details else title

    series: list[dict[str, Any]] = [{"name": name(each), "values": each.curve} for each in failed[:MAX_REASONS]]
    if others := failed[MAX_REASONS:]:
        series.append({"name": counted(len(others), "other"), "values": _summed([each.curve for each in others])})
    return series


def _sparks(report: ActivityReport) -> dict[str, list[float | None]]:
    """Return the values of the tiles' sparklines."""
    curves: dict[str, list[float | None]] = {
        "requests": list(report.curve.requests),
        "prompt": list(report.curve.prompt_tokens),
        "cached": list(report.curve.cached_tokens),
        "tokens": list(report.curve.completion_tokens),
        "cost": list(report.curve.cost),
        "errors": _summed([each.curve for each in report.refusals if each.status >= 500 or not each.status]),
        "limited": _summed([each.curve for each in report.refusals if each.status == 429]),
    }
    return {name: means(values, SPARK_POINTS) for name, values in curves.items()}


def _summed(curves: Sequence[Sequence[int]]) -> list[float | None]:
    return [float(sum(values)) for values in zip(*curves, strict=True)]


def _attempts(report: ActivityReport, *, is_before: bool) -> int:
    """Return the number of requests that were admitted or refused."""
    admitted = report.before.requests if is_before else report.total.requests
    return admitted + sum(_number(each, is_before) for each in report.refusals if each.status)


def _count_refusals(refusals: Sequence[Refusals], status: int, is_before: bool) -> int:
    """Return the number of requests with an HTTP status; 500 counts all faults of the gateway and of engines."""
    if status == 500:
        return sum(_number(each, is_before) for each in refusals if each.status >= 500 or not each.status)
    return sum(_number(each, is_before) for each in refusals if each.status == status)


def _number(refusals: Refusals, is_before: bool) -> int:
    return refusals.before if is_before else refusals.requests


def _rate_text(rate: float) -> str:
    """Return the text of a rate per second; "" below MIN_RATE, where the number alone says more."""
    return f"· {short(rate)} per s" if rate >= MIN_RATE else ""


def _step_text(step: int) -> str:
    """Return the length of a chart's step after "per"."""
    return {MINUTE: "minute", HOUR: "hour", DAY: "day"}.get(step) or f"{step // MINUTE} minutes"


def _quantiles(now: Percentiles | None, before: Percentiles | None) -> list[Quantile]:
    return [
        Quantile(name, value, _change(value, getattr(before, name, None)))
        for name in QUANTILE_NAMES
        for value in [getattr(now, name, None)]
    ]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _change(now: float | None, before: float | None) -> float | None:
    """Return the relative difference; None without a value before."""
    return None if now is None or not before else now / before - 1
