"""Pages of tenants: the list with changes of many, and the actions for one tenant."""

from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlencode

from aiohttp import web

from gateway.api.admin.tenants import TenantChanges, read_filter
from gateway.api.page_guard import form_of
from gateway.api.requests.fields import read_fields
from gateway.api.scopes import ACTOR
from gateway.components import Records
from gateway.errors import BadRequest, Conflict
from gateway.limits.periods import PERIOD_WORDS
from gateway.pages.frame.frame import Frame
from gateway.pages.tenants.forms import LIST
from gateway.pages.widgets.form_checks import is_confirmed, typing_error
from gateway.pages.widgets.forms import terms_text
from gateway.pages.widgets.tables import ROWS, Column, read_page, read_table, send_csv
from gateway.records.tenants.bulk import BulkChange
from gateway.records.tenants.list import Sort, TenantFilter, tightest_budget
from gateway.records.tenants.tenants import Tenant

FILTERS = ("q", "plan", "tag", "suspended", "over_budget", "idle_days")
LIST_QUERY = (*FILTERS, "sort", "page", "format", "done")
BUDGET_HINT = "The budget of which most is spent. The order is by the spend of this month (UTC)"
REQUESTS_HINT = "Served requests to models in this month (UTC); refused ones are not counted"
USE_HINT = "Last use of any of its keys: also by a log-in, a refused request, or one that only reads a list"
COLUMNS = (
    Column("name", "Tenant", value=lambda row: row[0].name),
    Column("state", "State", sortable=False, value=lambda row: "suspended" if row[0].suspended else "active"),
    Column("plan", "Plan", value=lambda row: row[0].plan),
    Column("spend", "Budget used", numeric=True, value=lambda row: row[1].spend, hint=BUDGET_HINT),
    Column("forecast", "Forecast", numeric=True, value=lambda row: row[1].forecast),
    Column("requests", "Requests", numeric=True, value=lambda row: row[1].requests, hint=REQUESTS_HINT),
    Column("last_used_at", "Key last used", value=lambda row: row[1].last_used_at, hint=USE_HINT),
    Column("tags", "Tags", sortable=False, value=lambda row: " ".join(row[0].tags)),
    Column("created", "Created", value=lambda row: row[0].created_at),
)


class TenantPages:
    """Pages of the tenants' list and actions."""

    def __init__(self, frame: Frame, records: Records) -> None:
        self._frame = frame
        self._records = records

    async def list(self, request: web.Request) -> web.StreamResponse:
        """Return a page of the list, or all of it as CSV. An error of a filter is shown at its field, without rows."""
        errors: dict[str, str] = {}
        criteria, is_csv = TenantFilter(), request.query.get("format") == "csv"
        # An empty field of the form is no filter.
        query = {name: value for name, value in request.query.items() if value}
        if query.get("plan") == "none":
            query["plan"] = ""
        try:
            criteria = read_filter(query)
        except BadRequest as error:
            if is_csv:
                raise
            errors[error.param or ""] = error.message
        table = read_table(request, "tenants", COLUMNS, "name")
        sort, lists = cast(Sort, table.sort), self._records.tenant_lists

        async def read(limit: int, offset: int) -> tuple[Sequence[Any], int]:
            page = await lists.page(criteria, sort=sort, descending=table.descending, limit=limit, offset=offset)
            return page.rows, page.total

        if is_csv:
            return await send_csv(request, "tenants", COLUMNS, read)
        if not errors:
            await read_page(table, read)
        return await self._frame.render_long(
            request,
            "tenants.html",
            title="Tenants",
            status=400 if errors else 200,
            table=table,
            errors=errors,
            tightest=lambda row: tightest_budget(*row),
            period_words=PERIOD_WORDS,
            plans=[(plan.name, plan.name) for plan in await self._records.plans.list()],
            filters={name: request.query[name] for name in FILTERS if request.query.get(name)},
            done=DONE.get(request.query.get("done", "")),
        )

    async def bulk(self, request: web.Request) -> web.StreamResponse:
        """Show the effects of a change of all matching tenants; with a confirmed form, make it."""
        form = form_of(request)
        filters = {name: form[name] for name in FILTERS if form.get(name)}
        criteria = read_filter(filters | ({"plan": ""} if filters.get("plan") == "none" else {}))
        change = _bulk_change(form)
        back = f"{LIST}?{urlencode(filters)}"
        planned = await self._records.tenant_bulk.plan(criteria, change)
        count, error = str(len(planned)), None
        if "typed" in form:
            if form["typed"].strip() == count:
                try:
                    await self._records.tenant_bulk.apply(criteria, change, len(planned), request[ACTOR])
                except Conflict as conflict:
                    error = conflict.message
                else:
                    await self._records.auth.catch_up()
                    raise web.HTTPSeeOther(f"{back}&done=bulk" if filters else f"{LIST}?done=bulk")
            else:
                error = f"Type {count}, the number of tenants that change."
        shown = [(row.tenant, terms_text(row.before), terms_text(row.after)) for row in planned[:ROWS]]
        more = f" The first {ROWS} are shown." if len(planned) > ROWS else ""
        return self._frame.confirm(
            request,
            title="Change many tenants",
            name=count,
            text=f"{count} tenants change.{more}",
            button="Change them",
            fields={name: value for name, value in form.items() if name not in ("csrf", "typed")},
            changes=shown,
            cancel=back,
            error=error,
        )

    async def suspend(self, request: web.Request) -> web.StreamResponse:
        tenant = await self._records.tenants.get(request.match_info["tenant"])
        text = f"All keys of {tenant.name} are refused and its running streams end, until it is resumed."
        return await self._act(request, tenant, "Suspend", text)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        tenant = await self._records.tenants.get(request.match_info["tenant"])
        text = f"{tenant.name} is deleted with its keys, adapter names and their prices. Its usage stays on record."
        return await self._act(request, tenant, "Delete", text)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        tenant = await self._records.tenants.get(request.match_info["tenant"])
        await self._change(request, tenant, {"suspended": False})
        raise web.HTTPSeeOther(f"{LIST}/{tenant.name}?done=resumed")

    async def _act(self, request: web.Request, tenant: Tenant, act: str, text: str) -> web.StreamResponse:
        """Ask for the tenant's name, then suspend or delete it."""
        if is_confirmed(request, tenant.name):
            if act == "Suspend":
                await self._change(request, tenant, {"suspended": True})
                raise web.HTTPSeeOther(f"{LIST}/{tenant.name}?done=suspended")
            await self._records.tenants.delete(tenant.name, request[ACTOR], self._records.bases.names)
            await self._records.auth.catch_up()
            raise web.HTTPSeeOther(f"{LIST}?done=deleted")
        return self._frame.confirm(
            request,
            title=f"{act} {tenant.name}",
            name=tenant.name,
            text=text,
            button=act,
            cancel=f"{LIST}/{tenant.name}",
            error=typing_error(request, tenant.name),
        )

    async def _change(self, request: web.Request, tenant: Tenant, changes: Mapping[str, Any]) -> None:
        if changes:
            await self._records.tenants.update(tenant.name, changes, request[ACTOR])
            await self._records.auth.catch_up()


DONE = {
    "bulk": "The tenants have changed.",
    "deleted": "The tenant is deleted.",
    "created": "The tenant is created. Next: create a key for it.",
    "changed": "The tenant has changed.",
    "same": "Nothing has changed.",
    "suspended": "The tenant is suspended.",
    "resumed": "The tenant's keys are accepted again.",
}


def _bulk_change(form: Mapping[str, str]) -> BulkChange:
    """Return the change of a form: `act` and the value that it needs. Raises BadRequest."""
    act, value = form.get("act", ""), form.get("value", "").strip()
    if act in ("suspend", "resume"):
        return BulkChange(fields={"suspended": act == "suspend"})
    if act == "plan":
        return BulkChange(fields={"plan": None if value in ("", "none") else value})
    if act in ("add_tags", "remove_tags") and value:
        tags = read_fields({"tags": value.replace(",", " ").split()}, TenantChanges).given()["tags"]
        return BulkChange(add_tags=tags) if act == "add_tags" else BulkChange(remove_tags=tags)
    raise BadRequest("act: choose a change, and give the plan or tags that it needs.", param="act")
