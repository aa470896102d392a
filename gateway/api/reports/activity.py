"""`/admin/api/activity`: sums and curves of a period, for charts."""

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from gateway.api.reports.money import priced, priced_struct
from gateway.api.requests.fields import json_response, parse_period, parse_text, read_limit
from gateway.errors import BadRequest
from gateway.records.activity.figures import ActivityReport, Curve, Group, Refusals, Sums, Times
from gateway.records.activity.report import GROUPS, MAX_GROUPS, ORDERS, Activity, Scope
from gateway.records.periods import STEPS

DEFAULT_GROUPS = 8
ActivitySums: Any = priced_struct(
    "ActivitySums",
    Sums,
    'Sums of admitted requests. failed: those that did not end as "ok" or "cancelled". queue_ms: the sum of the waits '
    "in queues. ttft, latency: null without a request that has it.",
)


class ActivityCurve(Struct, frozen=True, kw_only=True):
    """Values by step, as many as the report's `starts`."""

    requests: list[int]
    failed: list[int]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    completion_tokens: list[int]
    cost_micros: list[int]


class ActivityGroup(Struct, frozen=True, kw_only=True):
    """A tenant, a model or an engine.

    name: the tenant's, the model's or the engine's URL ("" for requests without an engine). tenant: the owner of a
    model; null for a base model of all tenants. before: the sums of the period before.
    """

    name: str
    tenant: str | None
    sums: ActivitySums
    before: ActivitySums
    curve: ActivityCurve


class ActivityAnswer(Struct, frozen=True, kw_only=True):
    """Activity of `[since, until)`, which is rounded to whole minutes, or hours where minutes are not kept.

    step: seconds between `starts`. total, before: the sums of all groups in this period and in the one before it, which
    begins at `before_since`. groups: the first in the order; others: the curve of all the rest, null if there is none.
    num_groups: number of all groups; null if not all were looked at. active_tenants: number of tenants with requests.
    """

    object: Literal["activity"] = "activity"
    currency: str
    since: datetime
    until: datetime
    before_since: datetime
    step: int
    starts: list[datetime]
    total: ActivitySums
    before: ActivitySums
    curve: ActivityCurve
    times: Times
    groups: list[ActivityGroup]
    others: ActivityCurve | None
    num_groups: int | None
    active_tenants: int
    refusals: list[Refusals]


class ActivityRoutes:
    """Route of the activity of a period, for charts. currency: the costs' currency."""

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
        return json_response(_describe(report, self._currency))


def _describe(report: ActivityReport, currency: str) -> ActivityAnswer:
    return ActivityAnswer(
        currency=currency,
        since=report.since,
        until=report.until,
        before_since=report.before_since,
        step=report.step,
        starts=report.starts,
        total=priced(ActivitySums, report.total),
        before=priced(ActivitySums, report.before),
        curve=_describe_curve(report.curve),
        times=report.times,
        groups=[_describe_group(group) for group in report.groups],
        others=None if report.others is None else _describe_curve(report.others),
        num_groups=report.num_groups,
        active_tenants=report.active_tenants,
        refusals=report.refusals,
    )


def _describe_group(group: Group) -> ActivityGroup:
    return ActivityGroup(
        name=group.name,
        tenant=group.tenant,
        sums=priced(ActivitySums, group.sums),
        before=priced(ActivitySums, group.before),
        curve=_describe_curve(group.curve),
    )


def _describe_curve(curve: Curve) -> ActivityCurve:
    return ActivityCurve(
        requests=curve.requests,
        failed=curve.failed,
        prompt_tokens=curve.prompt_tokens,
        cached_tokens=curve.cached_tokens,
        completion_tokens=curve.completion_tokens,
        cost_micros=curve.cost,
    )


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
