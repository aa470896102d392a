"""Routes of the pages of engines and of the tenants' shares."""

from functools import partial

from gateway.access.roles import ADMIN_PATH
from gateway.api.admin.fairness import FairnessAnswer
from gateway.api.route import Route
from gateway.pages.fleet.bases import BASES, BasePages
from gateway.pages.fleet.engines import EnginePages
from gateway.pages.fleet.fairness import FairnessPages

# Parameters of a page with a table.
LISTED = ("q", "sort", "page", "format")
_page = partial(Route, "GET", scope="page", response=None)
_form = partial(Route, scope="page", response=None, role="operator")
_act = partial(Route, "POST", scope="page", query=(), response=None)

FLEET_PAGES: dict[type, tuple[Route, ...]] = {
    BasePages: (
        _page(BASES, BasePages.list, "Return the page of the base models.", query=(*LISTED, "done")),
        _form("GET", f"{BASES}/new", BasePages.new, "Return the form of a new base model.", query=()),
        _form("POST", f"{BASES}/new", BasePages.new, "Add a base model from its form.", query=()),
        _form("GET", f"{BASES}/edit", BasePages.edit, "Return the form of a base model.", query=("name",)),
        _form("POST", f"{BASES}/edit", BasePages.edit, "Change a base model from its form.", query=("name",)),
        _form("GET", f"{BASES}/{{act}}", BasePages.act, "Ask before an act on a base model.", query=("name",)),
        _form("POST", f"{BASES}/{{act}}", BasePages.act, "Drain, retire or resume a base model.", query=()),
    ),
    EnginePages: (
        _page("/admin/engines", EnginePages.list, "Return the page of the engines.", query=(*LISTED, "state")),
        _page("/admin/engines/one", EnginePages.one, "Return the page of an engine.", query=("url", "sort", "format")),
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
            "/admin/fairness",
            FairnessPages.page,
            "Return the page of the tenants' shares.",
            query=(*LISTED, "preemptions_sort", "state", "table"),
        ),
        Route(
            "GET",
            f"{ADMIN_PATH}/api/fairness",
            FairnessPages.describe,
            "Return the tenants' shares, waits and preemptions.",
            scope="admin",
            query=(),
            response=FairnessAnswer,
        ),
    ),
}
