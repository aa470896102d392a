"""Table of the pages' routes, part of the table of all routes in `gateway/api/routes.py`."""

from functools import partial

from gateway.access.roles import ADMIN_PATH, CONSOLE_PATH, Role
from gateway.api.route import Route
from gateway.pages.adapter_routes import ADAPTER_PAGES
from gateway.pages.assets import Assets
from gateway.pages.console.routes import ADAPTER_PAGES as CONSOLE_ADAPTERS
from gateway.pages.console.routes import CONSOLE_PAGES
from gateway.pages.engines import EnginePages
from gateway.pages.fairness import FairnessPages
from gateway.pages.live import Live
from gateway.pages.login import LoginPages
from gateway.pages.oidc_login import OidcPages
from gateway.pages.overview import Overview
from gateway.pages.record_routes import RECORD_PAGES
from gateway.pages.report_routes import REPORT_PAGES
from gateway.pages.setting_routes import SETTING_PAGES


def _login_routes(home: str, people: str) -> tuple[Route, ...]:
    path, of = f"{home}/login", LoginPages
    least: Role = "viewer" if home == ADMIN_PATH else "tenant_member"
    opened, page = partial(Route, is_open=True, response=None), partial(Route, scope="page", role=least, response=None)
    return (
        opened("GET", path, of.form, f"Return the log-in page of {people}.", query=("next",)),
        opened("POST", path, of.log_in, f"Log in with a key, for {people}.", query=()),
        page("POST", f"{home}/logout", of.log_out, "Log out.", query=()),
    )


# Parameters of a page with a table.
LISTED = ("q", "sort", "page", "format")
_page = partial(Route, "GET", scope="page", query=(), response=None)
_act = partial(Route, "POST", scope="page", query=(), response=None)


def _oidc_routes(home: str) -> tuple[Route, ...]:
    path, opened = f"{home}/login/oidc", partial(Route, is_open=True, response=None)
    return (
        opened("GET", path, OidcPages.begin, "Log in at the OpenID Connect provider.", query=("next",)),
        opened("GET", f"{path}/return", OidcPages.finish, "Return from the OpenID Connect provider."),
    )


# Routes by the class that has their handlers.
PAGES: dict[type, tuple[Route, ...]] = {
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
        ),
    ),
    Live: (
        _page("/admin/events", Live.admin, "Stream the status strip to an operator's page."),
        _page("/console/events", Live.console, "Stream the status strip to a tenant's page."),
    ),
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
    Assets: (
        Route(
            "GET",
            "/static/{version}/{name:.+}",
            Assets.get,
            "Return a style, script or font of the pages.",
            is_open=True,
            response=None,
        ),
    ),
    **RECORD_PAGES,
    **REPORT_PAGES,
    **SETTING_PAGES,
    **{kind: (*ADAPTER_PAGES.get(kind, ()), *CONSOLE_ADAPTERS.get(kind, ())) for kind in ADAPTER_PAGES},
    OidcPages: _oidc_routes(ADMIN_PATH) + _oidc_routes(CONSOLE_PATH),
    **CONSOLE_PAGES,
    LoginPages: _login_routes(ADMIN_PATH, "operators") + _login_routes(CONSOLE_PATH, "tenants"),
}
