"""Usage reports: `/v1/usage` for the tenant itself, and the same report for operators."""

from typing import Any, Literal

from aiohttp import web
from msgspec import Struct, defstruct

from gateway.api.reports.money import priced, priced_struct
from gateway.api.requests.fields import json_response, parse_period, read_limit
from gateway.api.scopes import PRINCIPAL
from gateway.errors import BadRequest
from gateway.records.usage.report import GROUPS, UsageReport, UsageSums
from gateway.sharing.concurrency import report_limiter
from wire.money import exact_money

MAX_GROUPS = 1000


UsageGroup: Any = priced_struct(
    "UsageGroup",
    UsageSums,
    "Sums of one tenant and group. Fields that the report does not group by are absent. key: label of `key_id`, "
    "if it still exists. hour, day, month: its start, UTC. deleted: whether the tenant is deleted.",
)
COUNTS = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens")
UsageTotal: Any = defstruct(
    "UsageTotal", [*((name, int) for name in (*COUNTS, "cost_micros")), ("cost", str)], frozen=True, kw_only=True
)


class UsageAnswer(Struct, frozen=True, kw_only=True):
    """Page of a report. currency: the costs' currency. next: `after` of the next page; null on the last one."""

    object: Literal["usage"] = "usage"
    currency: str
    data: list[UsageGroup]
    total: UsageTotal
    next: str | None


class Usage:
    """Route for a tenant's own usage. currency: currency of its costs."""

    def __init__(self, *, report: UsageReport, currency: str) -> None:
        self._report = report
        self._currency = currency
        self._reads = report_limiter()

    async def get(self, request: web.Request) -> web.Response:
        """Report on the models that the key may use."""
        principal = request[PRINCIPAL]
        tenant_id = principal.tenant.id
        async with self._reads.place(tenant_id):
            which = {"tenant_id": tenant_id, "models": principal.allowed_models}
            return await usage_answer(request, self._report, self._currency, **which)


async def usage_answer(request: web.Request, report: UsageReport, currency: str, **which: Any) -> web.Response:
    """Return a page of sums by tenant and by the groups of `?group_by=`, and the total of all groups.

    currency: currency of the costs. criteria: the filters of `UsageReport.page`.
    """
    since, until = parse_period(request.query)
    page = await report.page(
        _read_groups(request),
        since=since,
        until=until,
        after=request.query.get("after"),
        limit=read_limit(request, MAX_GROUPS, MAX_GROUPS),
        **which,
    )
    groups = [priced(UsageGroup, sums) for sums in page.groups]
    cost = page.total["cost"]
    counts = {name: page.total[name] for name in COUNTS}
    total = UsageTotal(**counts, cost=exact_money(cost), cost_micros=cost)
    return json_response(UsageAnswer(currency=currency, data=groups, total=total, next=page.next))


def _read_groups(request: web.Request) -> list[str]:
    given = request.query.get("group_by", "model").split(",")
    for name in given:
        if name not in GROUPS:
            expected = ", ".join(GROUPS)
            raise BadRequest(f"group_by: expected one or more of {expected}, comma separated.", param="group_by")
    return given
