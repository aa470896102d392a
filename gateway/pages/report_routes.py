"""Routes of the pages of requests, refusals and usage, part of the table in `routes.py`."""

from functools import partial

from gateway.api import usage_export
from gateway.api.route import Route
from gateway.pages import refusals, requests, usage
from gateway.pages.refusals import RefusalPages
from gateway.pages.requests import RequestPages
from gateway.pages.search import SearchPage
from gateway.pages.usage import UsagePages

_page = partial(Route, "GET", scope="page", response=None)

REPORT_PAGES: dict[type, tuple[Route, ...]] = {
    RequestPages: (
        _page("/admin/requests", RequestPages.list, "Return the request log, or export it.", query=requests.QUERY),
        _page("/admin/requests/{id}", RequestPages.one, "Return the page of a request.", query=()),
    ),
    RefusalPages: (
        _page("/admin/refusals", RefusalPages.page, "Return why requests were refused.", query=refusals.QUERY),
    ),
    UsagePages: (
        _page("/admin/usage", UsagePages.page, "Return usage and cost.", query=usage.QUERY),
        _page("/admin/usage/export", UsagePages.export, "Return a file of usage.", query=usage_export.QUERY),
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
