"""Pages of plans."""

from collections.abc import Mapping, Sequence

from aiohttp import web
from multidict import MultiDict

from gateway.api.admin.plans import NewPlan
from gateway.api.page_guard import FORM
from gateway.api.requests.fields import parse_text
from gateway.api.scopes import ACTOR
from gateway.components import Records
from gateway.errors import BadRequest, Conflict
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.edits import Edit, again_if_changed, merge, shown_values
from gateway.pages.widgets.form_checks import form_errors, is_confirmed, read_form, typing_error
from gateway.pages.widgets.forms import NAMES, read_terms, term_groups, term_text, terms_text
from gateway.pages.widgets.price_fields import AMOUNTS, read_price
from gateway.pages.widgets.tables import Column, csv_response, fill, read_table
from gateway.records.money.plans import TenantPlan
from gateway.records.money.prices import ALL_ADAPTERS, EVERYTHING, Price
from gateway.records.tenants.terms import DEFAULTS, NO_TERMS, given_terms
from wire.money import format_money

PLANS = "/admin/plans"


def _terms_text(plan: TenantPlan) -> str:
    shown = {name: value for name, value in given_terms(plan.terms).items() if name != "model_limits"}
    return terms_text(shown) or "the defaults"


def _prices_text(plan: TenantPlan) -> str:
    return "; ".join(f"{model}: {_price_text(price)}" for model, price in plan.prices.items())


def _price_text(price: Price) -> str:
    return ", ".join(f"{name} {format_money(getattr(price, name))}" for name, _ in AMOUNTS)


PLAN_COLUMNS = (
    Column("name", "Plan"),
    Column("num_tenants", "Tenants", numeric=True),
    Column("terms", "Terms", sortable=False, value=_terms_text),
    Column("prices", "Prices", sortable=False, value=_prices_text),
    Column("updated_at", "Changed"),
)
PricedFields = tuple[str, list[tuple[str, str, str]]]
"""Title of a priced model, and (field, label, value) of its amounts."""


class PlanPages:
    """Pages of plans. currency: the currency of budgets and prices."""

    def __init__(self, frame: Frame, records: Records, currency: str) -> None:
        self._frame = frame
        self._records = records
        self._currency = currency

    async def list(self, request: web.Request) -> web.StreamResponse:
        words, known = (parse_text(request.query, "q") or "").lower(), await self._records.plans.list()
        plans = [plan for plan in known if words in plan.name.lower()]
        table = fill(read_table(request, "plans", PLAN_COLUMNS, "name"), plans)
        if request.query.get("format") == "csv":
            return csv_response("plans", PLAN_COLUMNS, plans)
        done = {"saved": "The plan is saved.", "deleted": "The plan is deleted."}.get(request.query.get("done", ""))
        return self._frame.render(
            request, "plans.html", title="Plans", table=table, num=len(known), done=done, terms_text=_terms_text
        )

    @again_if_changed
    async def edit(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a plan, or of a new one; with a form, save it."""
        name = request.match_info.get("plan")
        plan = None if name is None else await self._records.plans.get(name)
        sent, errors = request.get(FORM), dict[str, str]()
        present = {} if plan is None else self._values(plan)
        edit = Edit(MultiDict(present), {}) if sent is None else merge(sent, present)
        form, errors = edit.fields, dict(edit.conflicts)
        if sent is not None and not errors:
            values, _ = read_terms(form, errors)
            prices = self._read_prices(form, errors)
            given = read_form({**values, "prices": prices}, NewPlan, errors)
            if given is not None and not errors:
                with form_errors(errors):
                    await self._save(request, plan, form.get("name", "").strip(), given)
                    raise web.HTTPSeeOther(f"{PLANS}?done=saved")
        return self._frame.render(
            request,
            "plan_form.html",
            title=f"Plan {plan.name}" if plan else "New plan",
            status=edit.status if errors else 200,
            plan=plan,
            name=form.get("name", ""),
            groups=term_groups(NO_TERMS, DEFAULTS, form, self._currency),
            models=self._models(form),
            shown=shown_values(present) if plan else "",
            errors=errors,
        )

    @again_if_changed
    async def prices(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a plan's prices; with a form, save them."""
        plan = await self._records.plans.get(request.match_info["plan"])
        sent, present = request.get(FORM), self._price_values(plan)
        edit = Edit(MultiDict(present), {}) if sent is None else merge(sent, present)
        form, errors = edit.fields, dict(edit.conflicts)
        if sent is not None and not errors:
            prices = self._read_prices(form, errors)
            given = read_form({"prices": prices}, NewPlan, errors)
            if given is not None and not errors:
                with form_errors(errors):
                    known = {model: price.price() for model, price in given.prices.items()}
                    await self._records.plans.put_prices(plan.name, known, request[ACTOR], seen=plan)
                    await self._records.price_list.refresh()
                    raise web.HTTPSeeOther(f"{PLANS}?done=saved")
        return self._frame.render(
            request,
            "plan_prices.html",
            title=f"Prices of plan {plan.name}",
            status=edit.status if errors else 200,
            plan=plan,
            models=self._models(form),
            shown=shown_values(present),
            errors=errors,
        )

    async def delete(self, request: web.Request) -> web.StreamResponse:
        plan = await self._records.plans.get(request.match_info["plan"])
        error = typing_error(request, plan.name)
        if is_confirmed(request, plan.name):
            try:
                await self._records.plans.delete(plan.name, request[ACTOR])
                raise web.HTTPSeeOther(f"{PLANS}?done=deleted")
            except Conflict as conflict:
                error = conflict.message
        whose = "1 tenant has" if plan.num_tenants == 1 else f"{plan.num_tenants:,} tenants have"
        return self._frame.confirm(
            request,
            title=f"Delete plan {plan.name}",
            name=plan.name,
            text=f"{whose} this plan. Only a plan without tenants can be deleted.",
            button="Delete",
            cancel=PLANS,
            error=error,
        )

    async def _save(self, request: web.Request, plan: TenantPlan | None, name: str, fields: NewPlan) -> None:
        """Save a plan under its name; a new one, if `plan` is None, under `name`."""
        if plan is None and name in await self._records.plans.terms():
            raise BadRequest(f"A plan named '{name}' exists already.", param="name")
        if plan is not None:
            name = plan.name
        prices = {model: price.price() for model, price in fields.prices.items()}
        await self._records.plans.put(name, fields.terms(), prices, request[ACTOR], seen=plan)
        await self._records.price_list.refresh()
        await self._records.auth.catch_up()

    def _priced(self) -> Sequence[tuple[str, str, str]]:
        """Return (field, model, title) of the models that a plan can price."""
        bases = enumerate(self._records.bases.names)
        return [
            *((f"base{i or ''}", name, f"Base model {name}") for i, name in bases),
            ("adapters", ALL_ADAPTERS, "All adapters"),
            ("all", EVERYTHING, "Everything else"),
        ]

    def _values(self, plan: TenantPlan) -> dict[str, str]:
        """Return the form's fields of a plan as text."""
        terms = given_terms(plan.terms)
        return {name: term_text(name, terms[name]) if name in terms else "" for name in NAMES} | self._price_values(
            plan
        )

    def _price_values(self, plan: TenantPlan) -> dict[str, str]:
        prices = {field: plan.prices.get(model) for field, model, _ in self._priced()}
        return {
            f"{field}_{name}": "" if price is None else format_money(getattr(price, name))
            for field, price in prices.items()
            for name, _ in AMOUNTS
        }

    def _models(self, form: Mapping[str, str]) -> Sequence[PricedFields]:
        return [
            (title, [(f"{field}_{name}", label, form.get(f"{field}_{name}", "")) for name, label in AMOUNTS])
            for field, _, title in self._priced()
        ]

    def _read_prices(self, form: Mapping[str, str], errors: dict[str, str]) -> dict[str, dict[str, int]]:
        prices = {}
        for field, model, _ in self._priced():
            price = read_price(form, f"{field}_", errors)
            if price:
                prices[model] = price
        return prices
