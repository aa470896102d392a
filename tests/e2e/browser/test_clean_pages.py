"""Every page in light and dark, wide and narrow: no console error, no axe violation, no sideways scroll.

The pages come from the table of routes, so a new one is checked without a line here.
"""

import re
from typing import Any
from urllib.parse import quote

import pytest

from testing.browser import Person, faults_in_all_views, faults_of_pages, person
from testing.gateway.running import ADMIN_KEY, Gateway, until
from testing.gateway.upstream import Upstream
from tests.e2e.browser.pages import pages_below, path_of
from tests.e2e.browser.test_adapters import fill as push_adapters

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Routes that a browser may open and that are not opened here, with the reason.
NO_PAGES = {
    "/admin": "redirects to /admin/",
    "/console": "redirects to /console/",
    "/admin/events": "a stream",
    "/console/events": "a stream",
    "/admin/usage/export": "a file",
    "/admin/answers/{id}": "opened by the forms in `SENT`",
    "/console/answers/{id}": "opened by the forms in `SENT`",
    **{
        f"{home}/login/oidc{end}": "redirects to or from the provider, whose log-ins have tests of their own"
        for home in ("/admin", "/console")
        for end in ("", "/return")
    },
}
ADAPTER = ("", "?version=3", "?tab=use", "?tab=changes")
CONFIRM = ("?act=rollback&alias=prod", "?act=delete")
# The queries with which a page is opened, where it needs one or has different parts. {engine}: the engine's URL.
QUERIES: dict[str, tuple[str, ...]] = {
    "/admin/": ("", "?period=1h&by=model"),
    "/admin/search": ("?q=acme", "?q=none"),
    "/admin/engines/one": ("?url={engine}",),
    "/admin/engines/drain": ("?url={engine}",),
    "/admin/engines/bases/edit": ("?name=base",),
    "/admin/engines/bases/{act}": ("?name=base",),
    "/admin/tenants/{tenant}": ("", "?tab=limits", "?tab=keys", "?tab=audit"),
    "/admin/adapters": ("", "?q=none"),
    "/admin/tenants/{tenant}/adapters/{name}": ADAPTER,
    "/admin/tenants/{tenant}/adapters/{name}/alias": ("?alias=prod",),
    "/admin/tenants/{tenant}/adapters/{name}/confirm": CONFIRM,
    "/admin/tenants/{tenant}/adapter-upload": ("?name=pirate",),
    "/admin/playground": ("", "?tenant=acme"),
    "/admin/requests": ("", "?live=1&key=none"),
    "/admin/refusals": ("", "?tenant=acme&at=00:00&status=all"),
    "/admin/usage": ("?period=24h", "?group_by=key&measure=tokens", "?group_by=day"),
    "/admin/alerts": tuple(f"?tab={tab}" for tab in ("events", "targets", "thresholds")),
    "/admin/settings": tuple(
        f"?tab={tab}" for tab in ("state", "settings", "migrations", "keys", "sessions", "rejected")
    ),
    "/console/usage": ("", "?by=model"),
    "/console/adapters/{name}": ADAPTER,
    "/console/adapters/{name}/confirm": CONFIRM,
}
# Forms whose answers are pages without a route of their own: the form's page, its fields, its button, and a text of the
# answer: new secrets, reviews before a change, and errors at the fields.
Sent = tuple[str, dict[str, str], str, str]
SENT: dict[str, tuple[Sent, ...]] = {
    "/admin": (
        ("/admin/tenants/acme/keys/new", {"label": "phone"}, "Create", "lpx_"),
        ("/admin/keys/{id}/rotate", {}, "Rotate", "lpx_"),
        ("/admin/keys/new", {"label": "viewer"}, "Create", "lpx_"),
        ("/admin/alerts/-/new", {"name": "second", "url": "https://hooks.example.com/y"}, "Add", "second"),
        ("/admin/tenants?q=acme", {"value": "gold"}, "Preview the changes", "gold"),
        ("/admin/tenants/acme/edit", {"weight": "3"}, "Review the changes", "(inherited)"),
        ("/admin/tenants/-/new", {"name": "globex", "weight": "many"}, "Create", "Nothing was saved"),
    ),
    "/console": (
        ("/console/keys/new", {"label": "phone"}, "Create", "lpx_"),
        ("/console/keys/{id}/rotate", {}, "Rotate", "lpx_"),
    ),
}
REFUSED = "/admin/?period=year"


async def fill(gateway: Gateway, upstream: Upstream) -> tuple[str, dict[str, str]]:
    """Write each record that a page shows. Return a key of the tenant, and the values of the paths' variables."""
    acme = await push_adapters(gateway)
    upstream.resident = [(await acme.get("/v1/adapters/pirate")).json["digest"], f"sha256:{'d' * 64}"]
    admin, answer = gateway.admin, await acme.chat(model="pirate")
    budget = await admin.call("PATCH", "/admin/api/tenants/acme", json={"budget_per_month": 50_000_000})
    scopes = ["inference", "adapters", "usage", "keys"]
    keys = [
        (await admin.post("/admin/api/tenants/acme/keys", {"label": label, "scopes": scopes})).json
        for label in ("Ada", "robot")
    ]
    puts = (
        ("webhooks/pager", {"url": "https://hooks.example.com/x"}),
        ("prices/base", {"input": 1_000_000, "output": 1_000_000}),
        ("plans/gold", {"requests_per_minute": 60}),
    )
    made = [await admin.call("PUT", f"/admin/api/{path}", json=body) for path, body in puts]
    assert [each.status // 100 for each in (answer, budget, *made)] == [2] * 5
    request = answer.headers["x-request-id"]

    async def is_recorded() -> bool:
        return (await admin.get(f"/admin/api/requests/{request}")).status == 200

    await until(is_recorded)
    return keys[0]["key"], {
        "tenant": "acme",
        "name": "pirate",
        "alerts/name": "pager",
        "plan": "gold",
        "model": "base",
        "act": "drain",
        "keys/id": keys[1]["id"],
        "requests/id": request,
        "engine": quote(upstream.url, safe=""),
    }


def paths(home: str, known: dict[str, str]) -> list[str]:
    """Return the URLs of the pages below a home, the log-in page excepted."""
    routes = [route for route in pages_below(home) if route.scope == "page" and route.canonical not in NO_PAGES]
    return [
        path_of(route, known) + query.format(**known)
        for route in routes
        for query in QUERIES.get(route.canonical, ("",))
    ]


async def faults_of_answers(who: Person, home: str, known: dict[str, str]) -> list[str]:
    """Send each form and return the faults of its answer, which a page of secrets shows only once."""
    found = []
    for path, fields, button, text in SENT[home]:
        await who.open(path.format(id=known["keys/id"]))
        await open_all(who)
        for name, value in fields.items():
            await who.page.fill(f"main form[method=post] [name={name}]", value)
        await who.page.click(f"main button:has-text('{button}')")
        await who.page.wait_for_url(f"**{home}/answers/**")
        await who.sees(text, "main")
        await who.page.wait_for_load_state()
        # The browser writes a line for an answer of 400.
        who.problems = [each for each in who.problems if "status of 400" not in each]
        found += [f"the answer of {path}{each}" for each in await faults_in_all_views(who)]
    return found


async def open_all(who: Person) -> None:
    """Open each closed part of the page."""
    await who.page.evaluate("document.querySelectorAll('main details').forEach(each => { each.open = true; })")


async def test_every_route_is_a_page_or_has_a_reason():
    known = {route.canonical for home in ("/admin", "/console") for route in pages_below(home)}
    assert len(known) > 60
    assert known >= {"/admin/login", "/console/login", *NO_PAGES, *QUERIES}


@pytest.mark.timeout(300)  # about 100 pages in four views: two minutes on a slow machine
async def test_every_page_is_clean(gateway: Gateway, upstream: Upstream, browser: Any):
    key, known = await fill(gateway, upstream)
    found: list[str] = []
    for home, secret in (("/admin", ADMIN_KEY), ("/console", key)):
        async with person(browser, gateway.url) as who:
            found += await faults_of_pages(who, [f"{home}/login"])
            await who.page.fill("[name=key]", "wrong")
            await who.page.click("main button")
            await who.sees("not valid", "main [role=alert]")
            who.problems = [each for each in who.problems if not re.search("status of 40[13]", each)]
            found += [f"a refused log-in at {home}{each}" for each in await faults_in_all_views(who)]
            await who.log_in(home, secret)
            if home == "/admin":
                [session] = (await gateway.admin.get("/admin/api/sessions")).json["data"]
                known["sessions/id"] = session["id"]
            found += await faults_of_pages(who, paths(home, known))
            found += await faults_of_answers(who, home, known)
            refused = await faults_of_pages(who, [REFUSED]) if home == "/admin" else []
            found += [each for each in refused if "status of 400" not in each]
    assert not found, "\n".join(found)
