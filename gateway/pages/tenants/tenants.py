"""Pages of tenants: the list with changes of many, the forms, and the acts on one tenant."""

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote, urlencode

from aiohttp import web

from gateway.access.page_guard import FORM
from gateway.access.scopes import ACTOR
from gateway.api.admin.tenants import NewTenant, TenantChanges, read_filter
from gateway.api.requests.fields import read_fields
from gateway.errors import BadRequest, Conflict, GatewayError
from gateway.pages.frame.frame import Frame
from gateway.pages.parts.answers import error_field, is_confirmed, typing_error
from gateway.pages.parts.forms import read_money, read_terms, term_fields, term_text
from gateway.pages.parts.tables import ROWS, Column, csv_response, read_table, window
from gateway.parts import Records
from gateway.records.tenants.bulk import BulkChange
from gateway.records.tenants.list import Sort, TenantFilter
from gateway.records.tenants.tenants import TEXTS, Tenant
from gateway.records.tenants.terms import DEFAULTS, NO_TERMS, resolve

LIST = "/admin/tenants"
FILTERS = ("q", "plan", "tag", "suspended", "over_budget", "idle_days")
LIST_QUERY = (*FILTERS, "sort", "page", "format", "done")
BUDGET = "budget_per_month"
COLUMNS = (
    Column("name", "Tenant", value=lambda row: row[0].name),
    Column("state", "State", sortable=False, value=lambda row: "suspended" if row[0].suspended else "active"),
    Column("plan", "Plan", sortable=False, value=lambda row: row[0].plan),
    Column("spend", "Budget used", numeric=True, value=lambda row: row[1].spend, hint="Spend of this month (UTC)"),
    Column("forecast", "Forecast", numeric=True, sortable=False, value=lambda row: row[1].forecast),
    Column("requests", "Requests", numeric=True, value=lambda row: row[1].requests, hint="This month (UTC)"),
    Column("last_used_at", "Last use", sortable=False, value=lambda row: row[1].last_used_at),
    Column("tags", "Tags", sortable=False, value=lambda row: " ".join(row[0].tags)),
    Column("created", "Created", value=lambda row: row[0].created_at),
)


class TenantPages:
    """Pages of the tenants' list and forms. currency: of budgets."""

    def __init__(self, frame: Frame, records: Records, currency: str) -> None:
        self._frame = frame
        self._records = records
        self._currency = currency

    async def list(self, request: web.Request) -> web.StreamResponse:
        errors: dict[str, str] = {}
        which = TenantFilter()
        # A field of the form that was left empty is no filter.
        query = {name: value for name, value in request.query.items() if value}
        if query.get("plan") == "none":
            query["plan"] = ""
        try:
            which = read_filter(query)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        table = read_table(request, "tenants", COLUMNS, "name")
        is_csv = request.query.get("format") == "csv"
        page = await self._records.tenant_lists.page(which, sort=cast(Sort, table.sort), **window(table, is_csv=is_csv))
        if is_csv:
            return csv_response("tenants", COLUMNS, page.rows)
        table.rows, table.total = page.rows, page.total
        return self._frame.render(
            request,
            "tenants.html",
            title="Tenants",
            status=400 if errors else 200,
            table=table,
            errors=errors,
            plans=[(plan.name, plan.name) for plan in await self._records.plans.list()],
            filters={name: request.query[name] for name in FILTERS if request.query.get(name)},
            done=DONE.get(request.query.get("done", "")),
        )

    async def bulk(self, request: web.Request) -> web.StreamResponse:
        """Show what a change of all matching tenants would do; after its confirmation, do it."""
        form = request[FORM]
        filters = {name: form[name] for name in FILTERS if form.get(name)}
        which = read_filter(filters | ({"plan": ""} if filters.get("plan") == "none" else {}))
        change = _bulk_change(form)
        back = f"{LIST}?{urlencode(filters)}"
        planned = await self._records.tenant_bulk.plan(which, change)
        count, error = str(len(planned)), None
        if "typed" in form:
            if form["typed"].strip() == count:
                try:
                    await self._records.tenant_bulk.apply(which, change, len(planned), request[ACTOR])
                except Conflict as conflict:
                    error = conflict.message
                else:
                    await self._records.auth.catch_up()
                    raise web.HTTPSeeOther(f"{back}&done=bulk" if filters else f"{LIST}?done=bulk")
            else:
                error = f"Type {count}, the number of tenants that change."
        shown = [(row.tenant, _texts(row.before), _texts(row.after)) for row in planned[:ROWS]]
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

    async def new(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a new tenant; with a form, create it."""
        form = request.get(FORM)
        errors: dict[str, str] = {}
        if form is not None:
            values, _ = _read_form(form, errors)
            name = form.get("name", "").strip()
            if not errors:
                try:
                    fields = read_fields({"name": name, **values}, NewTenant).given()
                    await self._records.tenants.create(fields.pop("name"), fields, request[ACTOR])
                except GatewayError as error:
                    errors[error_field(error)] = error.message
                else:
                    raise web.HTTPSeeOther(f"{LIST}/{quote(name)}?done=created")
        return await self._form(request, None, errors)

    async def edit(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a tenant; with a form, change it."""
        tenant = await self._records.tenants.get(request.match_info["tenant"])
        form = request.get(FORM)
        errors: dict[str, str] = {}
        if form is not None:
            values, empty = _read_form(form, errors)
            if not errors:
                try:
                    changes = read_fields({**values, "inherit": empty}, TenantChanges).given()
                    await self._change(request, tenant, _changed(tenant, changes))
                except GatewayError as error:
                    errors[error_field(error)] = error.message
                else:
                    raise web.HTTPSeeOther(f"{LIST}/{tenant.name}?done=changed")
        return await self._form(request, tenant, errors)

    async def budget(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a tenant's budget; with a form, change it."""
        tenant = await self._records.tenants.get(request.match_info["tenant"])
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            text = form.get(BUDGET, "").strip()
            try:
                change: dict[str, Any] = {BUDGET: None if text == "none" else read_money(text)}
                await self._change(request, tenant, {"inherit": (BUDGET,)} if not text else change)
                raise web.HTTPSeeOther(f"{LIST}/{tenant.name}?done=changed")
            except ValueError as error:
                errors[BUDGET] = str(error)
        own = tenant.own.budget_per_month
        value = "" if own not in (None,) and not isinstance(own, int) else term_text(BUDGET, own)
        return self._frame.render(
            request,
            "tenant_budget.html",
            title=f"Budget of {tenant.name}",
            status=400 if errors else 200,
            tenant=tenant,
            value=value if form is None else form.get(BUDGET, ""),
            errors=errors,
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
            base_model = self._records.catalog.base_model
            await self._records.tenants.delete(tenant.name, request[ACTOR], base_model)
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

    async def _form(self, request: web.Request, tenant: Tenant | None, errors: dict[str, str]) -> web.StreamResponse:
        form = request.get(FORM)
        terms = await self._records.plans.terms()
        of_plan = terms.get((tenant.plan if tenant else None) or "", NO_TERMS)
        own = NO_TERMS if tenant is None else tenant.own
        inherited = resolve(of_plan, NO_TERMS) if of_plan is not NO_TERMS else DEFAULTS
        texts = {name: (getattr(tenant, name) if tenant else None) or "" for name in TEXTS}
        values = texts | {
            "plan": (tenant.plan if tenant else None) or "",
            "tags": " ".join(tenant.tags if tenant else ()),
        }
        return self._frame.render(
            request,
            "tenant_form.html",
            title=f"Edit {tenant.name}" if tenant else "New tenant",
            status=400 if errors else 200,
            tenant=tenant,
            values=values if form is None else {**values, **form},
            fields=term_fields(own, inherited, form, self._currency),
            plans=[("", "No plan"), *((name, name) for name in sorted(terms))],
            errors=errors,
        )


DONE = {
    "bulk": "The tenants have changed.",
    "deleted": "The tenant is deleted.",
    "created": "The tenant is created. Next: create a key for it.",
    "changed": "The tenant has changed.",
    "suspended": "The tenant is suspended.",
    "resumed": "The tenant's keys are accepted again.",
}


def _read_form(form: Mapping[str, str], errors: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return (fields of TenantChanges, terms that are inherited)."""
    values, empty = read_terms(form, errors)
    texts = {name: form.get(name, "").strip() for name in TEXTS}
    tags = sorted(set(form.get("tags", "").replace(",", " ").split()))
    return {**values, **texts, "tags": tags, "plan": form.get("plan") or None}, empty


def _changed(tenant: Tenant, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that differ from the tenant's own fields, so that the audit names these only."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        if name == "inherit":
            inherited = tuple(term for term in value if getattr(tenant.own, term) is not getattr(NO_TERMS, term))
            found |= {"inherit": inherited} if inherited else {}
        elif name in DEFAULTS:
            found |= {name: value} if getattr(tenant.own, name) != value else {}
        elif (getattr(tenant, name) or None) != (value or None):
            found[name] = value
    return found


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


def _texts(fields: Mapping[str, Any]) -> str:
    shown = {name: " ".join(v) if isinstance(v, tuple | list) else term_text(name, v) for name, v in fields.items()}
    return ", ".join(f"{name}: {value}" for name, value in shown.items())
