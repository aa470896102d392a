"""Routes of the pages of alerts, settings and the audit log."""

from functools import partial

from gateway.api.route import Route
from gateway.pages.settings import alerts, audit, page
from gateway.pages.settings.alerts import AlertPages
from gateway.pages.settings.audit import AuditPages
from gateway.pages.settings.page import SettingPages

TARGET = "/admin/alerts/{name}"
_page = partial(Route, scope="page", response=None)
_form = partial(Route, scope="page", response=None, role="operator", query=())

SETTING_PAGES: dict[type, tuple[Route, ...]] = {
    AlertPages: (
        _page("GET", "/admin/alerts", AlertPages.show, "Return the page of alerts.", query=alerts.LIST_QUERY),
        _form("GET", "/admin/alerts/-/new", AlertPages.new, "Return the form of a new target of events."),
        _form("POST", "/admin/alerts/-/new", AlertPages.new, "Add a target of events and show its secret once."),
        _page("GET", TARGET, AlertPages.target, "Return the page of a target of events.", query=("done",)),
        _form("GET", f"{TARGET}/edit", AlertPages.edit, "Return the form of a target of events."),
        _form("POST", f"{TARGET}/edit", AlertPages.edit, "Change a target of events."),
        _form("POST", f"{TARGET}/test", AlertPages.test, "Send a test event from the page."),
        _form("GET", f"{TARGET}/delete", AlertPages.delete, "Ask whether to delete a target of events."),
        _form("POST", f"{TARGET}/delete", AlertPages.delete, "Delete a target of events."),
    ),
    SettingPages: (
        _page("GET", "/admin/settings", SettingPages.show, "Return the page of settings.", query=page.QUERY),
        _form("GET", "/admin/settings/sessions/{id}/end", SettingPages.end_session, "Ask whether to end a session."),
        _form("POST", "/admin/settings/sessions/{id}/end", SettingPages.end_session, "End a session from the page."),
    ),
    AuditPages: (
        _page("GET", "/admin/audit", AuditPages.list, "Return the page of the audit log.", query=audit.QUERY),
    ),
}
