"""Routes of the pages of engines and of the tenants' shares."""

from functools import partial

from gateway.access.roles import ADMIN_PATH
from gateway.api.route import Route
from gateway.pages.fleet.engines import EnginePages
from gateway.pages.fleet.fairness import FairnessPages

# Parameters of a page with a table.
LISTED = ("q", "sort", "page", "format")
_page = partial(Route, "GET", scope="page", response=None)
_act = partial(Route, "POST", scope="page", query=(), response=None)

FLEET_PAGES: dict[type, tuple[Route, ...]] = {
    EnginePages: (
        _page("/admin/engines", EnginePages.list, "Return the page of the engines.", query=(*LISTED, "state")),
        _page("/admin/engines/one", EnginePages.one, "Return the page of an engine.", query=("url",)),
        _page("/admin/engines/residency", EnginePages.residency, "Return where adapters are.", query=LISTED),
        _page(
            "/admin/engines/drain",
            EnginePages.ask,
            "Return the page that confirms a drain.",
            query=("url",),
            role="operator",
        ),
        _act("/admin/engines/drain", EnginePages.drain, "Drain an engine, from its page."),
        _act("/admin/engines/resume", EnginePages.resume, "Resume an engine, from its page."),
    ),
    FairnessPages: (
        _page(
            "/admin/fairness", FairnessPages.page, "Return the page of the tenants' shares.", query=(*LISTED, "state")
        ),
        Route(
            "GET",
            f"{ADMIN_PATH}/api/fairness",
            FairnessPages.describe,
            "Return the tenants' shares, waits and preemptions.",
            scope="admin",
            query=(),
        ),
    ),
}
