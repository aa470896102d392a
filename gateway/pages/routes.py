"""Table of the pages' routes, by the class that has their handlers; part of the table in `gateway/route_table.py`."""

from gateway.api.route import Route
from gateway.pages.adapters.routes import ADAPTER_PAGES
from gateway.pages.console.routes import ADAPTER_PAGES as CONSOLE_ADAPTERS
from gateway.pages.console.routes import CONSOLE_PAGES
from gateway.pages.fleet.routes import FLEET_PAGES
from gateway.pages.frame.routes import FRAME_PAGES
from gateway.pages.login.routes import LOGIN_PAGES
from gateway.pages.money.routes import MONEY_PAGES
from gateway.pages.overview.routes import OVERVIEW_PAGES
from gateway.pages.requests.routes import REQUEST_PAGES
from gateway.pages.settings.routes import SETTING_PAGES
from gateway.pages.tenants.routes import TENANT_PAGES

PAGES: dict[type, tuple[Route, ...]] = {
    **FRAME_PAGES,
    **LOGIN_PAGES,
    **OVERVIEW_PAGES,
    **FLEET_PAGES,
    **TENANT_PAGES,
    **MONEY_PAGES,
    **REQUEST_PAGES,
    **SETTING_PAGES,
    **{kind: (*routes, *CONSOLE_ADAPTERS.get(kind, ())) for kind, routes in ADAPTER_PAGES.items()},
    **CONSOLE_PAGES,
}
