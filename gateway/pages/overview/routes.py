"""Routes of the overview and the search box."""

from functools import partial

from gateway.access.roles import ADMIN_PATH
from gateway.api.route import Route
from gateway.pages.overview.attention import NeedList
from gateway.pages.overview.page import Overview
from gateway.pages.overview.search import SearchPage

_page = partial(Route, "GET", scope="page", response=None)

OVERVIEW_PAGES: dict[type, tuple[Route, ...]] = {
    Overview: (
        Route("GET", "/admin", Overview.redirect, "Redirect to the overview.", is_open=True, response=None),
        _page("/admin/", Overview.page, "Return the overview.", query=("period", "since", "until", "by")),
        Route(
            "GET",
            f"{ADMIN_PATH}/api/attention",
            Overview.attention,
            "List what needs attention, the worst first.",
            scope="admin",
            query=(),
            response=NeedList,
        ),
    ),
    SearchPage: (
        Route(
            "POST",
            "/admin/search",
            SearchPage.submit,
            "Go to the page of an id or a name.",
            scope="page",
            role="viewer",
            query=(),
            response=None,
        ),
        _page("/admin/search", SearchPage.results, "Return tenants, adapters and keys that match.", query=("q",)),
    ),
}
