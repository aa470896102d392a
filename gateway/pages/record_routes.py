"""Routes of the pages of tenants, keys, plans, prices and the audit log, part of the table in `routes.py`."""

from functools import partial

from gateway.api.route import Route
from gateway.pages import audit, keys, tenant_page, tenants
from gateway.pages.audit import AuditPages
from gateway.pages.keys import KeyPages
from gateway.pages.plans import PlanPages
from gateway.pages.prices import PricePages
from gateway.pages.tenant_page import TenantPage
from gateway.pages.tenants import TenantPages

TENANT, PLAN, KEY = "/admin/tenants/{tenant}", "/admin/plans/{plan}", "/admin/keys/{id}"
TABLE = ("sort", "page", "format", "done")
_page = partial(Route, scope="page", response=None)
_form = partial(Route, scope="page", response=None, role="operator", query=())
_billing = partial(Route, scope="page", response=None, role="billing", query=())

RECORD_PAGES: dict[type, tuple[Route, ...]] = {
    TenantPages: (
        _page("GET", "/admin/tenants", TenantPages.list, "Return the page of tenants.", query=tenants.LIST_QUERY),
        _form("POST", "/admin/tenants/-/bulk", TenantPages.bulk, "Change all tenants that match."),
        _form("GET", "/admin/tenants/-/new", TenantPages.new, "Return the form of a new tenant."),
        _form("POST", "/admin/tenants/-/new", TenantPages.new, "Create a tenant."),
        _form("GET", f"{TENANT}/edit", TenantPages.edit, "Return the form of a tenant."),
        _form("POST", f"{TENANT}/edit", TenantPages.edit, "Change a tenant."),
        _billing("GET", f"{TENANT}/budget", TenantPages.budget, "Return the form of a tenant's budget."),
        _billing("POST", f"{TENANT}/budget", TenantPages.budget, "Change a tenant's budget."),
        _form("GET", f"{TENANT}/suspend", TenantPages.suspend, "Ask whether to suspend a tenant."),
        _form("POST", f"{TENANT}/suspend", TenantPages.suspend, "Suspend a tenant."),
        _form("POST", f"{TENANT}/resume", TenantPages.resume, "Resume a tenant."),
        _form("GET", f"{TENANT}/delete", TenantPages.delete, "Ask whether to delete a tenant."),
        _form("POST", f"{TENANT}/delete", TenantPages.delete, "Delete a tenant."),
    ),
    TenantPage: (_page("GET", TENANT, TenantPage.show, "Return the page of a tenant.", query=tenant_page.QUERY),),
    KeyPages: (
        _page("GET", "/admin/keys", KeyPages.list, "Return the page of keys.", query=keys.LIST_QUERY),
        _form("GET", "/admin/keys/new", KeyPages.new_admin, "Return the form of a new admin key."),
        _form("POST", "/admin/keys/new", KeyPages.new_admin, "Create an admin key and show it once."),
        _form("GET", f"{TENANT}/keys/new", KeyPages.new, "Return the form of a new key."),
        _form("POST", f"{TENANT}/keys/new", KeyPages.new, "Create a key and show it once."),
        _form("GET", f"{KEY}/rotate", KeyPages.rotate, "Return the form of a rotation."),
        _form("POST", f"{KEY}/rotate", KeyPages.rotate, "Rotate a key and show the new one once."),
        _form("GET", f"{KEY}/revoke", KeyPages.revoke, "Ask whether to revoke a key."),
        _form("POST", f"{KEY}/revoke", KeyPages.revoke, "Revoke a key."),
    ),
    PlanPages: (
        _page(
            "GET", "/admin/plans", PlanPages.list, "Return the page of plans.", query=("sort", "page", "format", "done")
        ),
        _form("GET", "/admin/plans/-/new", PlanPages.edit, "Return the form of a new plan."),
        _form("POST", "/admin/plans/-/new", PlanPages.edit, "Create a plan."),
        _form("GET", PLAN, PlanPages.edit, "Return the form of a plan."),
        _form("POST", PLAN, PlanPages.edit, "Change a plan."),
        _billing("GET", f"{PLAN}/prices", PlanPages.prices, "Return the form of a plan's prices."),
        _billing("POST", f"{PLAN}/prices", PlanPages.prices, "Change a plan's prices."),
        _form("GET", f"{PLAN}/delete", PlanPages.delete, "Ask whether to delete a plan."),
        _form("POST", f"{PLAN}/delete", PlanPages.delete, "Delete a plan."),
    ),
    PricePages: (
        _page(
            "GET",
            "/admin/prices",
            PricePages.list,
            "Return the page of prices.",
            query=("model", *TABLE),
        ),
        _billing("POST", "/admin/prices", PricePages.list, "Set a price."),
        _billing("GET", "/admin/prices/{model:.+}/delete", PricePages.delete, "Ask whether to delete a price."),
        _billing("POST", "/admin/prices/{model:.+}/delete", PricePages.delete, "Delete a price."),
    ),
    AuditPages: (
        _page("GET", "/admin/audit", AuditPages.list, "Return the page of the audit log.", query=audit.QUERY),
    ),
}
