"""Routes of the pages of plans, prices and usage."""

from functools import partial

from gateway.api.reports import usage_export
from gateway.api.route import Route
from gateway.pages.money import usage
from gateway.pages.money.plans import PlanPages
from gateway.pages.money.prices import PricePages
from gateway.pages.money.usage import UsagePages

PLAN = "/admin/plans/{plan}"
TABLE = ("q", "sort", "page", "format", "done")
_page = partial(Route, scope="page", response=None)
_form = partial(Route, scope="page", response=None, role="operator", query=())
_billing = partial(Route, scope="page", response=None, role="billing", query=())

MONEY_PAGES: dict[type, tuple[Route, ...]] = {
    PlanPages: (
        _page("GET", "/admin/plans", PlanPages.list, "Return the page of plans.", query=TABLE),
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
    UsagePages: (
        _page("GET", "/admin/usage", UsagePages.page, "Return usage and cost.", query=usage.QUERY),
        _page("GET", "/admin/usage/export", UsagePages.export, "Return a file of usage.", query=usage_export.QUERY),
    ),
}
