"""Routes of tenants, plans and prices; a part of the table in `gateway/api/routes.py`."""

from collections.abc import Mapping
from functools import partial

from gateway.api.admin.plans import AdminPlans, DeletedPlan, NewPlan, PlanList, PlanPrices, ShownPlan
from gateway.api.admin.prices import AdminPrices, DeletedPrice, NewPrice, ShownPrice, ShownPrices
from gateway.api.admin.tenant_bulk import AdminTenantBulk, BulkPreview, BulkResult, NewBulk
from gateway.api.admin.tenants import (
    AdminTenants,
    DeletedTenant,
    ListedTenant,
    NewTenant,
    ShownTenant,
    TenantChanges,
    TenantList,
)
from gateway.api.route import Route
from gateway.api.route_groups import FORCE

TENANT_LIST = ("plan", "tag", "suspended", "over_budget", "q", "idle_days", "sort", "order", "limit", "after")
TENANT = "/admin/api/tenants/{tenant}"
PLAN = "/admin/api/plans/{plan}"
_admin = partial(Route, scope="admin", query=())

TENANT_ROUTES: Mapping[type, tuple[Route, ...]] = {
    AdminPlans: (
        _admin("GET", "/admin/api/plans", AdminPlans.list, "List the plans.", response=PlanList),
        _admin("GET", PLAN, AdminPlans.get, "Return a plan.", response=ShownPlan),
        _admin("PUT", PLAN, AdminPlans.put, "Create or replace a plan.", request=NewPlan, response=ShownPlan),
        _admin(
            "PUT",
            f"{PLAN}/prices",
            AdminPlans.put_prices,
            "Replace the prices of a plan.",
            role="billing",
            request=PlanPrices,
            response=ShownPlan,
        ),
        _admin("DELETE", PLAN, AdminPlans.delete, "Delete a plan that no tenant has.", response=DeletedPlan),
    ),
    AdminPrices: (
        _admin("GET", "/admin/api/prices", AdminPrices.list, "List the prices of tokens.", response=ShownPrices),
        _admin(
            "PUT",
            "/admin/api/prices/{model:.+}",
            AdminPrices.put,
            "Set a model's price.",
            role="billing",
            query=FORCE,
            request=NewPrice,
            response=ShownPrice,
        ),
        _admin(
            "DELETE",
            "/admin/api/prices/{model:.+}",
            AdminPrices.delete,
            "Remove a model's price.",
            role="billing",
            response=DeletedPrice,
        ),
    ),
    AdminTenants: (
        _admin(
            "POST",
            "/admin/api/tenants",
            AdminTenants.create,
            "Create a tenant.",
            query=FORCE,
            request=NewTenant,
            response=ShownTenant,
            statuses=(201,),
        ),
        _admin("GET", "/admin/api/tenants", AdminTenants.list, "List tenants.", query=TENANT_LIST, response=TenantList),
        _admin("GET", TENANT, AdminTenants.get, "Return a tenant.", response=ListedTenant),
        _admin(
            "PATCH",
            TENANT,
            AdminTenants.update,
            "Change a tenant.",
            role="billing",
            beyond=" for budgets, and 'operator' for every other field",
            query=FORCE,
            request=TenantChanges,
            response=ShownTenant,
        ),
        _admin("DELETE", TENANT, AdminTenants.delete, "Delete a tenant; its usage is kept.", response=DeletedTenant),
    ),
    AdminTenantBulk: (
        _admin(
            "POST",
            "/admin/api/tenants/bulk",
            AdminTenantBulk.change,
            "Change all tenants that match.",
            query=("dry_run",),
            request=NewBulk,
            response=(BulkPreview, BulkResult),
        ),
    ),
}
