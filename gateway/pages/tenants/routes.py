"""Routes of the pages of tenants and keys."""

from functools import partial

from gateway.api.route import Route
from gateway.pages.tenants import keys, page, tenants
from gateway.pages.tenants.forms import TenantForms
from gateway.pages.tenants.keys import KeyPages
from gateway.pages.tenants.page import TenantPage
from gateway.pages.tenants.tenants import TenantPages

TENANT, KEY = "/admin/tenants/{tenant}", "/admin/keys/{id}"
_page = partial(Route, scope="page", response=None)
_form = partial(Route, scope="page", response=None, role="operator", query=())
_billing = partial(Route, scope="page", response=None, role="billing", query=())

TENANT_PAGES: dict[type, tuple[Route, ...]] = {
    TenantPages: (
        _page("GET", "/admin/tenants", TenantPages.list, "Return the page of tenants.", query=tenants.LIST_QUERY),
        _form("POST", "/admin/tenants/-/bulk", TenantPages.bulk, "Change all tenants that match."),
        _form("GET", f"{TENANT}/suspend", TenantPages.suspend, "Ask whether to suspend a tenant."),
        _form("POST", f"{TENANT}/suspend", TenantPages.suspend, "Suspend a tenant."),
        _form("POST", f"{TENANT}/resume", TenantPages.resume, "Resume a tenant."),
        _form("GET", f"{TENANT}/delete", TenantPages.delete, "Ask whether to delete a tenant."),
        _form("POST", f"{TENANT}/delete", TenantPages.delete, "Delete a tenant."),
    ),
    TenantForms: (
        _form("GET", "/admin/tenants/-/new", TenantForms.new, "Return the form of a new tenant."),
        _form("POST", "/admin/tenants/-/new", TenantForms.new, "Create a tenant."),
        _form("GET", f"{TENANT}/edit", TenantForms.edit, "Return the form of a tenant."),
        _form("POST", f"{TENANT}/edit", TenantForms.edit, "Change a tenant."),
        _billing("GET", f"{TENANT}/budget", TenantForms.budget, "Return the form of a tenant's budgets."),
        _billing("POST", f"{TENANT}/budget", TenantForms.budget, "Change a tenant's budgets."),
    ),
    TenantPage: (_page("GET", TENANT, TenantPage.show, "Return the page of a tenant.", query=page.QUERY),),
    KeyPages: (
        _page("GET", "/admin/keys", KeyPages.list, "Return the page of keys.", query=keys.LIST_QUERY),
        _form("GET", "/admin/keys/new", KeyPages.new_admin, "Return the form of a new admin key."),
        _form("POST", "/admin/keys/new", KeyPages.new_admin, "Create an admin key and show it once."),
        _form("GET", f"{TENANT}/keys/new", KeyPages.new, "Return the form of a new key."),
        _form("POST", f"{TENANT}/keys/new", KeyPages.new, "Create a key and show it once."),
        _form("GET", f"{KEY}/edit", KeyPages.edit, "Return the form of a key."),
        _form("POST", f"{KEY}/edit", KeyPages.edit, "Change a key's label and limits."),
        _form("GET", f"{KEY}/rotate", KeyPages.rotate, "Return the form of a rotation."),
        _form("POST", f"{KEY}/rotate", KeyPages.rotate, "Rotate a key and show the new one once."),
        _form("GET", f"{KEY}/revoke", KeyPages.revoke, "Ask whether to revoke a key."),
        _form("POST", f"{KEY}/revoke", KeyPages.revoke, "Revoke a key."),
    ),
}
