"""Routes of the pages of adapters and of the playground."""

from functools import partial

from gateway.api.adapters.handlers import TenantAdapter
from gateway.api.route import Route, Upload
from gateway.pages.adapters.actions import ALIAS_QUERY, ASK_QUERY, AdapterActs
from gateway.pages.adapters.list import LIST_QUERY, AdapterListPage
from gateway.pages.adapters.page import QUERY as ADAPTER_QUERY
from gateway.pages.adapters.page import AdapterPages
from gateway.pages.adapters.playground import QUERY as PLAYGROUND_QUERY
from gateway.pages.adapters.playground import PlaygroundPages
from gateway.pages.adapters.upload import QUERY as UPLOAD_QUERY
from gateway.pages.adapters.upload import AdapterUploads

FOLDER = "/admin/tenants/{tenant}/adapters"
_page = partial(Route, "GET", scope="page", response=None)
# Forms of changes require the role that may make the change.
_form = partial(_page, role="operator")
_act = partial(Route, "POST", scope="page", query=())

ADAPTER_PAGES: dict[type, tuple[Route, ...]] = {
    AdapterListPage: (
        _page("/admin/adapters", AdapterListPage.show, "Return the page of all adapters.", query=LIST_QUERY),
    ),
    AdapterPages: (_page(f"{FOLDER}/{{name}}", AdapterPages.show, "Return an adapter's page.", query=ADAPTER_QUERY),),
    AdapterActs: (
        _form(f"{FOLDER}/{{name}}/confirm", AdapterActs.ask, "Ask before an action on an adapter.", query=ASK_QUERY),
        _form(f"{FOLDER}/{{name}}/alias", AdapterActs.alias_form, "Return the form of an alias.", query=ALIAS_QUERY),
        _act(f"{FOLDER}/{{name}}/act", AdapterActs.act, "Run an action of an adapter's page.", response=None),
    ),
    AdapterUploads: (
        _form(
            "/admin/tenants/{tenant}/adapter-upload",
            AdapterUploads.form,
            "Return the form that uploads an adapter.",
            query=UPLOAD_QUERY,
        ),
        _act(
            "/admin/tenants/{tenant}/adapter-upload",
            AdapterUploads.upload,
            "Upload an adapter from its form.",
            request=Upload,
            response=TenantAdapter,
        ),
    ),
    PlaygroundPages: (
        _page(
            "/admin/playground",
            PlaygroundPages.show,
            "Return the playground.",
            role="operator",
            query=PLAYGROUND_QUERY,
        ),
    ),
}
