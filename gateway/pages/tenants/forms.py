"""Forms of a tenant: a new one, all of its fields, or its budgets. A change is shown before it is made."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from gateway.api.admin.tenants import NewTenant, TenantChanges
from gateway.api.page_guard import FORM
from gateway.api.requests.named_models import check_names
from gateway.api.scopes import ACTOR
from gateway.components import Records
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.edits import again_if_changed, merge, shown_values
from gateway.pages.widgets.form_checks import form_errors, read_form
from gateway.pages.widgets.forms import BUDGET_TERMS, NAMES, TITLES, read_terms, term_groups, term_text
from gateway.records.tenants.tenants import TEXTS, Tenant
from gateway.records.tenants.terms import FIELDS, NO_TERMS, Terms, given_terms, own_terms, resolve

LIST = "/admin/tenants"
# Values of the button that saves the shown changes, and of the one that returns to the form.
SAVE, EDIT = "save", "edit"
# Error of tags: the API's has a regular expression.
TAGS = "Expected up to 20 tags of 1 to 32 characters A-Z, a-z, 0-9 and . _ : / -, beginning with a letter or digit."
# Terms that only the role operator may change.
LABELS = {"plan": "Plan", "tags": "Tags"} | {name: name.replace("_", " ").capitalize() for name in TEXTS}


class TenantForms:
    """Pages of the tenants' forms. currency: the budgets' currency."""

    def __init__(self, frame: Frame, records: Records, currency: str) -> None:
        self._frame = frame
        self._records = records
        self._currency = currency

    async def new(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a new tenant; with a form, create it."""
        form, errors = request.get(FORM), dict[str, str]()
        if form is not None:
            terms, _ = read_terms(form, errors)
            name = form.get("name", "").strip()
            given = read_form({"name": name, **terms, **_read_texts(form)}, NewTenant, errors)
            if "tags" in errors:
                errors["tags"] = TAGS
            models = () if "model_limits" in errors else terms.get("model_limits", ())
            with form_errors(errors):
                await self._records.tenants.check_free(name)
            with form_errors(errors):
                await check_names(self._records.catalog, None, models, "model_limits", any_adapter=True)
            if given is not None and not errors:
                with form_errors(errors):
                    fields = given.given()
                    await self._records.tenants.create(fields.pop("name"), fields, request[ACTOR])
                    raise web.HTTPSeeOther(f"{LIST}/{quote(name)}?done=created")
        return await self._form(request, None, form or {}, errors, NAMES)

    @again_if_changed
    async def edit(self, request: web.Request) -> web.StreamResponse:
        """Return the form of a tenant; with a form, show what changes, and then change it."""
        return await self._edit(request, NAMES)

    @again_if_changed
    async def budget(self, request: web.Request) -> web.StreamResponse:
        """Do the same with the form of its budgets."""
        return await self._edit(request, BUDGET_TERMS)

    async def _edit(self, request: web.Request, names: Sequence[str]) -> web.StreamResponse:
        tenant, plans = await self._records.tenants.get(request.match_info["tenant"]), await self._records.plans.terms()
        sent, errors = request.get(FORM), dict[str, str]()
        present = _values(tenant, plans, names)
        if sent is None:
            return await self._form(request, tenant, present, {}, names)
        form, errors = (edit := merge(sent, present)).fields, dict(edit.conflicts)
        if sent.get("act") != EDIT and not errors:
            terms, empty = read_terms(form, errors, names)
            texts = _read_texts(form) if names is NAMES else {}
            changed = read_form({**terms, **texts, "inherit": empty}, TenantChanges, errors)
            if "tags" in errors:
                errors["tags"] = TAGS
            if changed is not None and not errors:
                with form_errors(errors):
                    given = changed.given()
                    new = given.get("model_limits", {}).keys() - tenant.model_limits.keys()
                    await check_names(self._records.catalog, tenant, sorted(new), "model_limits", any_adapter=True)
                    changes = _changed(tenant, _own(tenant, plans), given)
                    rows = _shown_changes(tenant, plans, changes)
                    if not rows or form.get("act") == SAVE:
                        await self._save(request, tenant, changes)
                    return self._preview(request, tenant, form, rows)
        return await self._form(request, tenant, form, errors, names, edit.status)

    async def _save(self, request: web.Request, tenant: Tenant, changes: Mapping[str, Any]) -> None:
        """Make the changes. Raises HTTPSeeOther to the tenant's page, GatewayError."""
        if changes:
            await self._records.tenants.update(tenant.name, changes, request[ACTOR], seen=tenant)
            await self._records.auth.catch_up()
        raise web.HTTPSeeOther(f"{LIST}/{tenant.name}?done={'changed' if changes else 'same'}")

    def _preview(
        self, request: web.Request, tenant: Tenant, form: Mapping[str, str], rows: Sequence[tuple[str, str, str]]
    ) -> web.Response:
        return self._frame.confirm(
            request,
            title=f"Changes of {tenant.name}",
            name="",
            text="Nothing is saved yet. These values change:",
            button="Save",
            tone="primary",
            act=SAVE,
            again=("Back to the form", EDIT),
            changes=rows,
            fields={name: value for name, value in form.items() if name not in ("csrf", "act")},
            cancel=f"{LIST}/{tenant.name}",
        )

    async def _form(
        self,
        request: web.Request,
        tenant: Tenant | None,
        values: Mapping[str, str],
        errors: Mapping[str, str],
        names: Sequence[str],
        status: int = 400,
    ) -> web.StreamResponse:
        """Return the form with values by field. status: the HTTP status of an answer with errors."""
        plans = await self._records.plans.terms()
        of_plan = plans.get((tenant.plan if tenant else None) or "", NO_TERMS)
        groups = term_groups(NO_TERMS, resolve(of_plan, NO_TERMS), values, self._currency)
        return self._frame.render(
            request,
            "tenant_form.html",
            title=f"{'Edit' if names is NAMES else 'Budgets of'} {tenant.name}" if tenant else "New tenant",
            status=status if errors else 200,
            tenant=tenant,
            has_texts=names is NAMES,
            values=dict.fromkeys(LABELS, "") | dict(values),
            shown=shown_values(_values(tenant, plans, names)) if tenant else "",
            groups=[group for group in groups if {field.name for field in group.fields} <= set(names)],
            plans=[("", "No plan"), *((name, name) for name in sorted(plans))],
            errors=errors,
        )


def _values(tenant: Tenant, plans: Mapping[str, Terms], names: Sequence[str]) -> dict[str, str]:
    """Return the form's fields of a tenant as text: its own terms, an inherited one empty, and its other fields."""
    own = given_terms(_own(tenant, plans))
    values = {name: term_text(name, own[name]) if name in own else "" for name in names}
    if names is NAMES:
        values |= {name: getattr(tenant, name) or "" for name in (*TEXTS, "plan")} | {"tags": " ".join(tenant.tags)}
    return values


def _read_texts(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the form's fields that are no terms."""
    texts = {name: form.get(name, "").strip() for name in TEXTS}
    tags = sorted(set(form.get("tags", "").replace(",", " ").split()))
    return {**texts, "tags": tags, "plan": form.get("plan") or None}


def _own(tenant: Tenant, plans: Mapping[str, Terms]) -> Terms:
    return own_terms(tenant.own, plans.get(tenant.plan or "", NO_TERMS), tenant.terms())


def _changed(tenant: Tenant, own_terms: Terms, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields that differ from the tenant's own, so that the audit names these only."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "inherit":
            inherited = tuple(term for term in value if getattr(own_terms, term) is not msgspec.UNSET)
            found |= {"inherit": inherited} if inherited else {}
        elif name in FIELDS:
            found |= {name: value} if getattr(own_terms, name) != value else {}
        elif (getattr(tenant, name) or None) != (value or None):
            found[name] = value
    return found


def _shown_changes(
    tenant: Tenant, plans: Mapping[str, Terms], changes: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Return (label, old value, new value) of all fields that change, also of terms that a new plan changes."""
    own, plan = _own(tenant, plans), changes.get("plan", tenant.plan)
    terms = {name: value for name, value in changes.items() if name in FIELDS}
    new = msgspec.structs.replace(own, **dict.fromkeys(changes.get("inherit", ()), msgspec.UNSET) | terms)
    before, after = tenant.terms(), resolve(plans.get(plan or "", NO_TERMS), new)
    rows = [(LABELS[name], _text(getattr(tenant, name)), _text(changes[name])) for name in LABELS if name in changes]
    for name in FIELDS:
        was_own, is_own = (getattr(each, name) is not msgspec.UNSET for each in (own, new))
        if before[name] != after[name] or was_own != is_own:
            old, then = term_text(name, before[name]), term_text(name, after[name])
            rows.append((TITLES[name][0], _with_source(old, is_own=was_own), _with_source(then, is_own=is_own)))
    return rows


def _with_source(text: str, *, is_own: bool) -> str:
    return text if is_own else f"{text} (inherited)"


def _text(value: Any) -> str:
    return " ".join(value or ()) or "none" if isinstance(value, list | tuple) else value or "none"
