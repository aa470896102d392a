"""Navigation of the pages: the entries of each role, in the order in which they are shown."""

import re
from typing import NamedTuple

from aiohttp import web

OPERATOR, BILLING, VIEWER = "operator", "billing", "viewer"
TENANT_ADMIN, TENANT_MEMBER = "tenant_admin", "tenant_member"
# Titles for people.
ROLE_TITLES = {TENANT_ADMIN: "tenant admin", TENANT_MEMBER: "tenant member"}
ALL_ADMINS = frozenset({OPERATOR, BILLING, VIEWER})
TENANTS = frozenset({TENANT_ADMIN, TENANT_MEMBER})
# Pages of a tenant's adapters and keys belong to the lists of all adapters and keys, as their breadcrumbs say.
LISTED = re.compile(r"^(?:/admin/tenants/[^/]+|(/console))/(adapter|key)(?:s|-upload)(?=/|$)")


class Entry(NamedTuple):
    """Entry of the navigation. icon: a shape of `templates/widgets/icons.html`. Entries without a route are not shown.

    scope: needed by a tenant's session; "" for none.
    """

    title: str
    path: str
    icon: str
    group: str
    roles: frozenset[str] = ALL_ADMINS
    scope: str = ""


ENTRIES = (
    Entry("Overview", "/admin/", "overview", "Watch"),
    Entry("Requests", "/admin/requests", "requests", "Watch"),
    Entry("Why 429", "/admin/refusals", "refusals", "Watch"),
    Entry("Engines", "/admin/engines", "engines", "Watch"),
    Entry("Fairness", "/admin/fairness", "fairness", "Watch"),
    Entry("Tenants", "/admin/tenants", "tenants", "Manage"),
    Entry("Keys", "/admin/keys", "keys", "Manage"),
    Entry("Adapters", "/admin/adapters", "adapters", "Manage"),
    Entry("Playground", "/admin/playground", "playground", "Manage", frozenset({OPERATOR})),
    Entry("Usage and cost", "/admin/usage", "usage", "Account"),
    Entry("Plans", "/admin/plans", "plans", "Account"),
    Entry("Prices", "/admin/prices", "prices", "Account"),
    Entry("Alerts", "/admin/alerts", "alerts", "Account"),
    Entry("Audit", "/admin/audit", "audit", "Account"),
    Entry("Settings", "/admin/settings", "settings", "Account"),
    Entry("Home", "/console/", "overview", "Console", TENANTS),
    Entry("Requests", "/console/requests", "requests", "Console", TENANTS, "usage"),
    Entry("Usage and cost", "/console/usage", "usage", "Console", TENANTS, "usage"),
    Entry("Models and adapters", "/console/adapters", "adapters", "Console", TENANTS, "adapters"),
    Entry("Playground", "/console/playground", "playground", "Console", TENANTS, "inference"),
    Entry("Keys", "/console/keys", "keys", "Manage", TENANTS, "keys"),
    Entry("Audit", "/console/audit", "audit", "Manage", TENANTS, "keys"),
    Entry("Help", "/console/help", "help", "Learn", TENANTS),
)


def groups_for(role: str, scopes: frozenset[str], request: web.Request) -> list[tuple[str, list[tuple[Entry, bool]]]]:
    """Return (group, [(entry, whether it is the present page)]) of the role's entries that this gateway serves.

    scopes: the scopes of a tenant's session.
    """
    served = {resource.canonical for resource in request.app.router.resources()}
    path = LISTED.sub(lambda found: f"{found[1] or '/admin'}/{found[2]}s", request.path)
    groups: dict[str, list[tuple[Entry, bool]]] = {}
    for entry in ENTRIES:
        is_allowed = role in entry.roles and (not entry.scope or entry.scope in scopes)
        if is_allowed and entry.path in served:
            groups.setdefault(entry.group, []).append((entry, _is_here(entry, path)))
    return list(groups.items())


def _is_here(entry: Entry, path: str) -> bool:
    return path == entry.path or (not entry.path.endswith("/") and path.startswith(f"{entry.path}/"))
