"""Table of the console's routes, part of the table of all routes in `gateway/route_table.py`."""

from functools import partial

from gateway.api.route import Route, Upload
from gateway.pages.adapters import page as adapter_page
from gateway.pages.adapters.actions import ALIAS_QUERY, ASK_QUERY, AdapterActs
from gateway.pages.adapters.page import AdapterPages
from gateway.pages.adapters.upload import QUERY as UPLOAD_QUERY
from gateway.pages.adapters.upload import AdapterUploads
from gateway.pages.console import adapters, audit, keys, playground, requests, usage
from gateway.pages.console.adapters import ConsoleAdapters
from gateway.pages.console.audit import ConsoleAudit
from gateway.pages.console.help import ConsoleHelp
from gateway.pages.console.home import ConsoleHome
from gateway.pages.console.keys import ConsoleKeys
from gateway.pages.console.playground import ConsolePlayground
from gateway.pages.console.requests import ConsoleRequests
from gateway.pages.console.usage import ConsoleUsage

KEY, UPLOAD = "/console/keys/{id}", "/console/adapter-upload"
_page = partial(Route, "GET", scope="page", response=None, query=())
_form = partial(Route, "POST", scope="page", response=None, query=())

ADAPTERS = "/console/adapters"
ADAPTER = f"{ADAPTERS}/{{name}}"

# Pages of an adapter, which also have routes for operators.
ADAPTER_PAGES: dict[type, tuple[Route, ...]] = {
    AdapterPages: (_page(ADAPTER, AdapterPages.show, "Return an own adapter's page.", query=adapter_page.QUERY),),
    AdapterActs: (
        _page(f"{ADAPTER}/confirm", AdapterActs.ask, "Ask before an action on an own adapter.", query=ASK_QUERY),
        _page(f"{ADAPTER}/alias", AdapterActs.alias_form, "Return the form of an own alias.", query=ALIAS_QUERY),
        _form(f"{ADAPTER}/act", AdapterActs.act, "Run an action of an own adapter's page."),
    ),
    AdapterUploads: (
        _page(UPLOAD, AdapterUploads.form, "Return the form that uploads an own adapter.", query=UPLOAD_QUERY),
        _form(UPLOAD, AdapterUploads.upload, "Upload an own adapter from its form.", request=Upload),
    ),
}
CONSOLE_PAGES: dict[type, tuple[Route, ...]] = {
    ConsoleHome: (
        Route("GET", "/console", ConsoleHome.redirect, "Redirect to the console.", is_open=True, response=None),
        _page("/console/", ConsoleHome.show, "Return the console's first page."),
    ),
    ConsoleRequests: (
        _page("/console/requests", ConsoleRequests.list, "Return the page of the own requests.", query=requests.QUERY),
        _page("/console/requests/{id}", ConsoleRequests.one, "Return the page of an own request."),
    ),
    ConsoleAdapters: (
        _page(ADAPTERS, ConsoleAdapters.show, "Return the page of the own models.", query=adapters.QUERY),
    ),
    ConsolePlayground: (
        _page(
            "/console/playground",
            ConsolePlayground.show,
            "Return the playground of the own models.",
            query=playground.QUERY,
        ),
    ),
    ConsoleUsage: (
        _page("/console/usage", ConsoleUsage.show, "Return the page of the tenant's usage.", query=usage.QUERY),
    ),
    ConsoleKeys: (
        _page("/console/keys", ConsoleKeys.list, "Return the page of the tenant's keys.", query=keys.LIST_QUERY),
        _page("/console/keys/new", ConsoleKeys.new, "Return the form of an own new key."),
        _form("/console/keys/new", ConsoleKeys.new, "Create an own key and show it once."),
        _page(f"{KEY}/edit", ConsoleKeys.edit, "Return the form of an own key."),
        _form(f"{KEY}/edit", ConsoleKeys.edit, "Change an own key's label and limits."),
        _page(f"{KEY}/rotate", ConsoleKeys.rotate, "Return the form of an own key's rotation."),
        _form(f"{KEY}/rotate", ConsoleKeys.rotate, "Rotate an own key and show the new one once."),
        _page(f"{KEY}/revoke", ConsoleKeys.revoke, "Ask whether to revoke an own key."),
        _form(f"{KEY}/revoke", ConsoleKeys.revoke, "Revoke an own key."),
    ),
    ConsoleAudit: (
        _page("/console/audit", ConsoleAudit.list, "Return the page of the tenant's audit log.", query=audit.QUERY),
    ),
    ConsoleHelp: (_page("/console/help", ConsoleHelp.show, "Return the page about the use of a key."),),
}
