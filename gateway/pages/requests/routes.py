"""Routes of the pages of requests and refusals."""

from functools import partial

from gateway.api.route import Route
from gateway.pages.requests import log, refusals
from gateway.pages.requests.log import RequestPages
from gateway.pages.requests.refusals import RefusalPages

_page = partial(Route, "GET", scope="page", response=None)

REQUEST_PAGES: dict[type, tuple[Route, ...]] = {
    RequestPages: (
        _page("/admin/requests", RequestPages.list, "Return the request log, or export it.", query=log.QUERY),
        _page("/admin/requests/{id}", RequestPages.one, "Return the page of a request.", query=()),
    ),
    RefusalPages: (
        _page("/admin/refusals", RefusalPages.page, "Return why requests were refused.", query=refusals.QUERY),
    ),
}
