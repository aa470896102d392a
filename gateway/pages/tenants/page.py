"""Page of one tenant: its usage, share and adapters, limits with what is left of them, keys and changes."""

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from aiohttp import web

from gateway.access.auth import TenantPrincipal
from gateway.api.requests.fields import parse_text
from gateway.components import Records
from gateway.errors import Unavailable
from gateway.limits.kinds import REQUEST_KINDS
from gateway.limits.periods import PERIOD_WORDS
from gateway.pages.frame.frame import Frame
from gateway.pages.tenants.forms import LIST
from gateway.pages.tenants.overview_tab import OverviewTab
from gateway.pages.tenants.tenants import DONE, USE_HINT
from gateway.pages.widgets.audit_rows import CSV_COLUMNS as AUDIT_CSV_COLUMNS
from gateway.pages.widgets.audit_rows import audit_csv, audit_row, audit_table
from gateway.pages.widgets.forms import NAMES, TITLES, term_text
from gateway.pages.widgets.key_rows import CSV_COLUMNS as KEY_CSV_COLUMNS
from gateway.pages.widgets.key_rows import KEY_COLUMNS, key_context
from gateway.pages.widgets.limit_rows import SOFT_KINDS, LimitRow, soft_row, used_row
from gateway.pages.widgets.links import Links
from gateway.pages.widgets.states import TONES, outcome
from gateway.pages.widgets.tables import ROWS, Column, Table, csv_response, fill, read_table
from gateway.quota.quota import Quota
from gateway.quota.remaining_limits import Remaining
from gateway.records.tenants.list import tightest_budget
from gateway.records.tenants.tenants import Tenant
from gateway.records.tenants.terms import NO_TERMS, own_terms, sources
from wire.money import exact_money

QUERY = ("tab", "sort", "page", "after", "format", "done")
DAYS = 30
USAGE_COLUMNS = (
    Column("model", "Model"),
    Column("requests", "Requests", numeric=True),
    Column("prompt_tokens", "In", numeric=True),
    Column("cached_tokens", "Cached", numeric=True),
    Column("completion_tokens", "Out", numeric=True),
    Column("cost", "Cost", numeric=True),
)
LIMIT_COLUMNS = (
    Column("title", "Limit", sortable=False),
    Column("used", "Used now", sortable=False),
    Column("source", "From", sortable=False, hint="The tenant itself, its plan, or the default"),
    Column("resets_at", "All free again", sortable=False, hint="If nothing more is used"),
)
LIMIT_CSV_COLUMNS = (
    LIMIT_COLUMNS[0],
    Column("text", "Value"),
    Column("used", "Used"),
    *LIMIT_COLUMNS[2:],
)


class TenantPage:
    """Page of one tenant. currency: the currency of its budgets."""

    def __init__(self, frame: Frame, records: Records, quota: Quota, currency: str, overview_tab: OverviewTab) -> None:
        self._frame = frame
        self._records = records
        self._quota = quota
        self._currency = currency
        self._overview_tab = overview_tab

    async def show(self, request: web.Request) -> web.StreamResponse:
        tenant = await self._records.tenants.get(request.match_info["tenant"])
        tabs = {"usage": self._usage, "limits": self._limits, "keys": self._keys, "audit": self._audit}
        tab = request.query.get("tab", "usage")
        tab = tab if tab in tabs else "usage"
        shown = await tabs[tab](request, tenant)
        if isinstance(shown, web.StreamResponse):
            return shown
        month = (await self._records.tenant_lists.months([tenant]))[tenant.id]
        return self._frame.render(
            request,
            "tenant.html",
            title=tenant.name,
            tenant=tenant,
            month=month,
            tightest=tightest_budget(tenant, month),
            period_words=PERIOD_WORDS,
            fairness=self._overview_tab.fairness.of(tenant.id),
            ttft=await self._overview_tab.first_token(tenant),
            use_hint=USE_HINT,
            tab=tab,
            tabs=_tabs(request, tenant, tab),
            done=DONE.get(request.query.get("done", "")),
            **{"is_away": False} | shown,
        )

    async def _usage(self, request: web.Request, tenant: Tenant) -> dict[str, Any] | web.StreamResponse:
        since = datetime.now(UTC) - timedelta(days=DAYS)
        page = await self._records.report.page(("model",), tenant_id=tenant.id, since=since, limit=1000)
        table = read_table(request, "usage", USAGE_COLUMNS, "-cost")
        if request.query.get("format") == "csv":
            columns = (*USAGE_COLUMNS[:-1], Column("cost", "Cost", value=lambda row: exact_money(row.cost)))
            return csv_response(f"usage-{tenant.name}", columns, page.groups)
        seen = {"table": fill(table, page.groups), "links": Links(request), "outcome": outcome, "tones": TONES}
        return seen | await self._overview_tab.read(tenant)

    async def _limits(self, request: web.Request, tenant: Tenant) -> dict[str, Any] | web.StreamResponse:
        left: dict[str, Remaining] = {}
        is_away = False
        try:
            found = await self._quota.peek(TenantPrincipal(key_id="", tenant=tenant))
            left = {each.limit.name: each for each in found if each.limit.owner == "tenant"}
        except Unavailable:
            is_away = True
        of_plan = (await self._records.plans.terms()).get(tenant.plan or "", NO_TERMS)
        terms = tenant.terms()
        origin = sources(of_plan, own_terms(tenant.own, of_plan, terms))
        rows, now = [], datetime.now(UTC)
        month = (await self._records.tenant_lists.months([tenant]))[tenant.id]
        for name in NAMES:
            title, text = TITLES[name][0], term_text(name, terms[name])
            if name in left and name in {kind.name for kind in REQUEST_KINDS}:
                rows.append(used_row(left[name], title, text, origin[name], self._currency, now))
            elif name in SOFT_KINDS:
                rows.append(soft_row(tenant, name, month, origin[name], self._currency))
            else:
                rows.append(LimitRow(title, text, origin[name]))
        if request.query.get("format") == "csv":
            return csv_response(f"limits-{tenant.name}", LIMIT_CSV_COLUMNS, rows)
        return {"table": Table("limits", LIMIT_COLUMNS, rows), "is_away": is_away}

    async def _keys(self, request: web.Request, tenant: Tenant) -> dict[str, Any] | web.StreamResponse:
        table = read_table(request, "keys", KEY_COLUMNS, "-created_at")
        keys = await self._records.keys.list(tenant)
        if request.query.get("format") == "csv":
            return csv_response(f"keys-{tenant.name}", KEY_CSV_COLUMNS, keys)
        return key_context(fill(table, keys))

    async def _audit(self, request: web.Request, tenant: Tenant) -> dict[str, Any] | web.StreamResponse:
        if request.query.get("format") == "csv":
            return await audit_csv(request, partial(self._records.audit.list, tenant=tenant.name), AUDIT_CSV_COLUMNS)
        after = parse_text(request.query, "after")
        entries, has_more = await self._records.audit.list(tenant=tenant.name, after=after, limit=ROWS)
        table = audit_table(request, [audit_row(entry) for entry in entries], has_more=has_more)
        return {"table": table}


def _tabs(request: web.Request, tenant: Tenant, here: str) -> list[tuple[str, str, bool]]:
    own = (("usage", "Usage"), ("limits", "Limits now"), ("keys", "Keys"), ("audit", "Audit"))
    tabs = [(title, f"{LIST}/{tenant.name}?tab={name}", name == here) for name, title in own]
    served = {resource.canonical for resource in request.app.router.resources()}
    others = (("Adapters", "/admin/adapters"), ("Requests", "/admin/requests"))
    return tabs + [(title, f"{path}?tenant={tenant.name}", False) for title, path in others if path in served]
