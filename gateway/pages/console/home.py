"""`/console/`: the tenant's spend, its limits now, today's requests, and how to call the service."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from aiohttp import web

from gateway.access.auth import TenantPrincipal
from gateway.api.scopes import PRINCIPAL
from gateway.errors import Unavailable
from gateway.pages.console.access import Console, ConsolePages, needs
from gateway.pages.widgets.examples import example_models, make_snippets, origin
from gateway.pages.widgets.forms import term_text
from gateway.pages.widgets.limit_rows import SOFT_KINDS, LimitRow, soft_row, used_row
from gateway.quota.limits import Limit, limits_of
from gateway.quota.remaining_limits import Remaining
from gateway.records.activity.figures import ActivityReport, Curve
from gateway.records.activity.report import Activity, Scope
from gateway.records.version_state import READY

OWNERS = {"tenant": "tenant", "key": "your key"}
# Models of the charts; the others are one series.
TOP_MODELS = 6


class Today(NamedTuple):
    """Figures since 00:00 UTC. limited, errors: None if they are not known for the models of a limited key."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: int
    limited: int | None
    errors: int | None


class ConsoleHome(ConsolePages):
    """First page of the console."""

    def __init__(self, console: Console, activity: Activity) -> None:
        super().__init__(console)
        self._activity = activity

    async def redirect(self, _: web.Request) -> web.Response:
        """Redirect `/console` to the page, whose links are relative to `/console/`."""
        return web.Response(status=308, headers={"Location": "/console/"})

    @needs("any")
    async def show(self, request: web.Request) -> web.StreamResponse:
        principal, records = request[PRINCIPAL], self.console.records
        tenant = principal.tenant
        async with self.console.reads.place(tenant.id):
            limits, is_away = await self._limits(principal)
            context: dict[str, Any] = {"month": None, "today": None, "charts": []}
            if "usage" in principal.scopes:
                context |= await self._usage(principal)
            if context["month"] is not None:
                soft = [name for name in SOFT_KINDS if getattr(tenant.soft_budgets, name)]
                limits += [soft_row(tenant, name, context["month"], "tenant", self.console.currency) for name in soft]
            names = [each.name for each in await records.catalog.list(tenant) if each.state == READY]
        models = example_models(names, principal, self.console.base_names)
        return self.console.frame.render(
            request,
            "console/home.html",
            title=tenant.display_name or tenant.name,
            tenant=tenant,
            principal=principal,
            limits=limits,
            is_away=is_away,
            origin=origin(request),
            models=models,
            snippets=make_snippets(origin(request), models[0] if models else self.console.base_model(principal)),
            **context,
        )

    async def _limits(self, principal: TenantPrincipal) -> tuple[list[LimitRow], bool]:
        """Return the limits of the tenant and the key, and whether their rests are unknown."""
        now, is_away = datetime.now(UTC), False
        found: Sequence[Remaining | Limit]
        try:
            found = await self.console.quota.peek(principal)
        except Unavailable:
            found, is_away = limits_of(principal, ""), True
        rows = []
        for each in found:
            limit = each.limit if isinstance(each, Remaining) else each
            title, source = limit.kind.help, OWNERS.get(limit.owner, limit.owner)
            text = term_text(limit.name, limit.value)
            if isinstance(each, Remaining):
                rows.append(used_row(each, title, text, source, self.console.currency, now))
            else:
                rows.append(LimitRow(title, text, source))
        return rows, is_away

    async def _usage(self, principal: TenantPrincipal) -> dict[str, Any]:
        """Return the usage that the key may see: of all models, or of those to which it is limited."""
        records, tenant, now = self.console.records, principal.tenant, datetime.now(UTC)
        # A period has to begin before now.
        since = min(now.replace(hour=0, minute=0, second=0, microsecond=0), now - timedelta(seconds=1))
        if principal.allowed_models is not None:
            found = await records.report.page(
                ("model",), since=since, limit=1, tenant_id=tenant.id, models=principal.allowed_models
            )
            total = found.total
            used = Today(
                total["requests"], total["prompt_tokens"], total["completion_tokens"], total["cost"], None, None
            )
            return {"today": used}
        months = await records.tenant_lists.months([tenant])
        scope = Scope(tenant_id=tenant.id)
        today = await self._activity.report(since=since, scope=scope, has_times=False)
        yesterday = now - timedelta(days=1)
        day = await self._activity.report(
            since=yesterday, scope=scope, group_by="model", top=TOP_MODELS, has_times=False
        )
        return {"month": months[tenant.id], "today": _today(today), "charts": _charts(day)}


def _today(report: ActivityReport) -> Today:
    total = report.total
    return Today(
        total.requests,
        total.prompt_tokens,
        total.completion_tokens,
        total.cost,
        limited=sum(each.requests for each in report.refusals if each.status == 429),
        errors=sum(each.requests for each in report.refusals if each.status != 429),
    )


def _charts(report: ActivityReport) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (id, title, data) of the charts; none without requests."""
    if not report.total.requests and not report.refusals:
        return []
    times = [int(start.timestamp()) for start in report.starts]
    named: list[tuple[str, Curve]] = [(group.name, group.curve) for group in report.groups]
    if report.others is not None:
        named.append((report.rest_title, report.others))

    def stacked(values: Any, more: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        series = [*({"name": name, "values": values(curve)} for name, curve in named), *more]
        return {"times": times, "unit": "", "series": series, "stacked": True}

    refused = [sum(values) for values in zip(*(each.curve for each in report.refusals), strict=True)]
    failed = [{"name": "refused or failed", "values": refused}] if any(refused) else []
    return [
        ("requests", "Requests of the last 24 h", stacked(lambda curve: curve.requests, failed)),
        ("tokens", "Output tokens of the last 24 h", stacked(lambda curve: curve.completion_tokens)),
    ]
