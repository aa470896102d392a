"""Sessions of browsers: log-in, guard of pages, and every way in which a session ends."""

from datetime import timedelta
from typing import Any

import pytest

from gateway.access import sessions as sessions_module
from gateway.api.page_guard import safe_next
from gateway.route_table import ROUTES
from testing.gateway.clocks import clock_ahead
from testing.gateway.running import ADMIN_KEY, PEPPER, Browser, Gateway

SCOPES = ["adapters", "inference", "keys", "usage"]


async def tenants_key(gateway: Gateway, name: str = "acme", **fields: Any) -> tuple[str, str]:
    """Return the id and the clear text of a new key of a tenant."""
    await gateway.admin.post("/admin/api/tenants", {"name": name})
    made = (await gateway.admin.post(f"/admin/api/tenants/{name}/keys", {"scopes": SCOPES} | fields)).json
    return made["id"], made["key"]


async def sessions(gateway: Gateway) -> list[dict[str, Any]]:
    return (await gateway.admin.get("/admin/api/sessions")).json["data"]


async def is_in(browser: Browser) -> bool:
    """Return whether the browser's session is valid. A log-out without a CSRF value is refused only within one."""
    got = await browser.call("POST", f"{browser.home}/logout")
    assert got.status in (303, 403)
    return got.status == 403


async def test_log_in_and_out(gateway: Gateway):
    async with gateway.browser(None) as browser:
        asked = await browser.get("/admin/?period=7d")
        assert (asked.status, asked.headers["Location"]) == (303, "/admin/login?next=/admin/%3Fperiod%3D7d")
        form = await browser.get(asked.headers["Location"])
        assert form.status == 200
        assert 'value="/admin/?period=7d"' in form.body.decode()
        entered = await browser.log_in(ADMIN_KEY, "/admin/?period=7d")
        assert (entered.status, entered.headers["Location"]) == (303, "/admin/?period=7d")
        assert (await browser.get("/admin/?period=7d")).status == 200
        token = browser.cookie()
        assert (await browser.submit("/admin/logout")).status == 303
        assert (await browser.get("/admin/")).status == 303
        # The token is void, not only removed from the browser.
        kept = {"Cookie": f"loraplex_session={token}"}
        assert (await gateway.nobody.get("/admin/", headers=kept, allow_redirects=False)).status == 303
    audit = (await gateway.admin.get("/admin/api/audit?action=session")).json["data"]
    assert [(entry["action"], entry["actor"]) for entry in audit] == [
        ("session.close", "bootstrap"),
        ("session.open", "bootstrap"),
    ]
    assert audit[0]["session_id"] == audit[1]["target"]


async def test_the_cookie_is_limited(gateway: Gateway):
    async with gateway.browser(None) as browser:
        cookie = (await browser.log_in(ADMIN_KEY)).headers.getall("Set-Cookie")[0]
        assert {"HttpOnly", "SameSite=Strict", "Path=/admin"} <= set(cookie.split("; "))
        assert "Secure" not in cookie
    async with gateway.browser((await tenants_key(gateway))[1], "/console") as browser:
        assert browser.cookie() is not None


async def test_the_cookie_is_secure_behind_a_trusted_proxy_only(serve: Any):
    for trusted, is_secure in ((["127.0.0.0/8"], True), ([], False)):
        async with serve(trusted_proxies=trusted) as gateway, gateway.browser(None) as browser:
            browser.session.headers["X-Forwarded-Proto"] = "https"
            cookies = (await browser.get("/admin/login")).headers.getall("Set-Cookie")
            assert ["Secure" in cookie for cookie in cookies] == [is_secure]


async def test_a_session_ends_with_its_key_and_its_tenant(gateway: Gateway):
    key_id, key = await tenants_key(gateway)
    other_id, other = await tenants_key(gateway)
    admin = (await gateway.admin.post("/admin/api/keys")).json
    async with (
        gateway.browser(key, "/console") as browser,
        gateway.browser(other, "/console") as neighbour,
        gateway.browser(admin["key"]) as operator,
    ):
        assert [await is_in(each) for each in (browser, neighbour, operator)] == [True] * 3
        await gateway.admin.call("DELETE", f"/admin/api/keys/{key_id}")
        await gateway.admin.call("DELETE", f"/admin/api/keys/{admin['id']}")
        assert [await is_in(each) for each in (browser, neighbour, operator)] == [False, True, False]
        await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})
        assert not await is_in(neighbour)
        await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": False})
        assert await is_in(neighbour)
        [own] = [each for each in await sessions(gateway) if each["key_id"] == other_id]
        assert (await gateway.admin.call("DELETE", f"/admin/api/sessions/{own['id']}")).status == 200
        assert not await is_in(neighbour)
        assert (await neighbour.log_in(other)).status == 303
        await gateway.admin.call("DELETE", "/admin/api/tenants/acme")
        assert not await is_in(neighbour)
    assert not any(each["tenant"] == "acme" for each in await sessions(gateway))


def pass_minutes(monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    """Set the clock of the sessions so far ahead. The browser's cookies keep their time."""
    monkeypatch.setattr(sessions_module, "datetime", clock_ahead(timedelta(minutes=minutes)))


async def test_a_session_ends_in_any_case(serve: Any, monkeypatch: pytest.MonkeyPatch):
    async with serve(session_seconds=1800.0) as gateway, gateway.browser() as browser:
        for minutes, expected in ((0, True), (25, True), (31, False)):
            pass_minutes(monkeypatch, minutes)
            assert await is_in(browser) == expected


async def test_a_session_ends_without_use(serve: Any, monkeypatch: pytest.MonkeyPatch):
    async with serve(session_idle_seconds=1800.0) as gateway, gateway.browser() as busy, gateway.browser() as idle:
        kept = {"Cookie": f"loraplex_session={idle.cookie()}"}
        for minutes in (0, 10, 20, 31, 45):
            pass_minutes(monkeypatch, minutes)
            assert await is_in(busy)
        got = await gateway.nobody.get("/admin/", headers=kept, allow_redirects=False)
        assert got.status == 303


async def test_a_new_log_in_gets_a_new_token_and_old_sessions_are_bounded(gateway: Gateway):
    _, key = await tenants_key(gateway)
    async with gateway.browser(key, "/console") as browser:
        before = browser.cookie()
        assert (await browser.log_in(key)).status == 303
        assert browser.cookie() != before
        # The former token ended; a token that the browser brings is never taken over.
        assert len(await sessions(gateway)) == 1
    made = [gateway.browser(key, "/console") for _ in range(8)]
    for each in made:
        async with each:
            pass
    throttled = [await _status(gateway, key) for _ in range(6)]
    assert 429 in throttled
    assert len(await sessions(gateway)) <= 10


async def _status(gateway: Gateway, key: str) -> int:
    async with Browser(gateway.url, "/console") as browser:
        return (await browser.log_in(key)).status


async def test_forged_changes_are_refused(gateway: Gateway):
    async with gateway.browser() as browser, gateway.browser() as other:
        for csrf in (None, "", "0" * 64, await other.csrf(), "é"):
            data = {} if csrf is None else {"csrf": csrf}
            got = await browser.call("POST", "/admin/logout", data=data)
            assert (got.status, got.error["code"]) == (403, "csrf_mismatch"), csrf
        good = await browser.csrf()
        sent = {"data": {"csrf": good}, "headers": {"Sec-Fetch-Site": "cross-site"}}
        assert (await browser.call("POST", "/admin/logout", **sent)).error["code"] == "csrf_mismatch"
        # Not in the query, and not as JSON.
        assert (await browser.call("POST", "/admin/logout", json={"csrf": good})).status == 403
        assert (await browser.call("POST", "/admin/logout", headers={"x-csrf": good})).status == 303
    async with gateway.browser(None) as browser:
        # A log-in that another site sends has neither the cookie nor the value of the form.
        forged = await browser.call("POST", "/admin/login", data={"key": ADMIN_KEY})
        assert forged.status == 403
        assert browser.cookie() is None


async def test_a_cookie_of_one_path_is_nothing_on_the_other(gateway: Gateway):
    _, key = await tenants_key(gateway)
    async with gateway.browser(key, "/console") as tenant, gateway.browser() as admin:
        of_tenant = {"Cookie": f"loraplex_session={tenant.cookie()}", "x-csrf": await tenant.csrf()}
        of_admin = {"Cookie": f"loraplex_session={admin.cookie()}", "x-csrf": await admin.csrf()}
    for route in ROUTES:
        if route.scope in ("admin", "page") and route.path.startswith(("/admin", "/metrics")):
            path = route.canonical.replace("{tenant}", "acme").replace("{", "").replace("}", "")
            got = await gateway.nobody.call(route.method, path, headers=of_tenant, allow_redirects=False)
            expected = (303,) if route.scope == "page" else (401,)
            assert got.status in expected, (route.method, path)
            if route.scope == "admin":
                # JSON routes take no cookie, not even an operator's.
                got = await gateway.nobody.call(route.method, path, headers=of_admin)
                assert got.status == 401, (route.method, path)
        elif route.scope == "page":
            path = route.canonical.replace("{", "").replace("}", "")
            got = await gateway.nobody.call(route.method, path, headers=of_admin, allow_redirects=False)
            assert got.status == 303, (route.method, path)


async def test_every_admin_route_has_its_least_role(gateway: Gateway):
    clients = {}
    for role in ("viewer", "billing", "operator"):
        clients[role] = gateway.client((await gateway.admin.post("/admin/api/keys", {"role": role})).json["key"])
    clients["tenant"] = gateway.client((await tenants_key(gateway))[1])
    order = ("viewer", "billing", "operator")
    for route in ROUTES:
        if route.scope != "admin":
            continue
        assert route.least_role in order, route.path
        path = route.canonical.replace("{", "").replace("}", "")
        for name, client in clients.items():
            if name in order and order.index(name) >= order.index(route.least_role):
                continue
            got = await client.call(route.method, path)
            code = "insufficient_permissions" if name == "tenant" else "role_needed"
            assert (got.status, got.error["code"]) == (403, code), (name, route.method, path)
            if name != "tenant":
                assert f"'{route.least_role}'" in got.error["message"]


async def test_keys_at_the_wrong_door_count_as_wrong_ones(gateway: Gateway):
    _, key = await tenants_key(gateway)
    revoked_id, revoked = await tenants_key(gateway)
    await gateway.admin.call("DELETE", f"/admin/api/keys/{revoked_id}")
    operator = (await gateway.admin.post("/admin/api/keys")).json["key"]
    async with gateway.browser(None) as browser:
        shown = []
        for wrong in (key, "lpx_guess", "lpx_" + "0" * 16 + "_" + "0" * 48):
            got = await browser.log_in(wrong)
            assert got.status == 401
            assert wrong not in got.body.decode()
            shown.append("This key is not valid here" in got.body.decode())
        assert shown == [True] * 3
    async with gateway.browser(None, "/console") as browser:
        assert "revoked" in (await browser.log_in(revoked)).body.decode()
        assert (await browser.log_in(ADMIN_KEY)).status in (401, 403)
        for _ in range(15):
            await browser.log_in("lpx_guess")
        throttled = await browser.log_in("lpx_guess")
        assert (throttled.status, int(throttled.headers["Retry-After"]) > 0) == (429, True)
    # The address is throttled now; an issued key is still served.
    audit = (await gateway.client(operator).get("/admin/api/audit?action=login.failed")).json["data"]
    assert 1 <= len(audit) <= 20
    assert all(entry["own"] for entry in audit)
    assert not any("guess" in str(entry) for entry in audit)


@pytest.mark.parametrize(
    "given",
    [
        "https://evil.example/admin/",
        "//evil.example/admin/",
        "/\\evil.example",
        "/admin/\\evil.example",
        "/admin//evil.example",
        "/admin/..//evil.example",
        "/admin/%2e%2e//evil.example",
        "/adminevil",
        "//[",
        "http://[/admin/",
        "/console/",
        "/admin/login",
        "/admin/logout",
        "javascript:alert(1)",
        " /admin/",
        "/admin/\r\nSet-Cookie: a=b",
        "/admin/" + "a" * 3000,
        "",
        None,
    ],
)
def test_no_open_redirect(given: str | None):
    assert safe_next(given, "/admin") == "/admin/"


async def test_a_form_without_a_session_leads_back_to_its_page(gateway: Gateway):
    for page, then in (
        ("/admin/tenants/acme/edit", "/admin/tenants/acme/edit"),
        ("/admin/tenants?q=a", "/admin/tenants%3Fq%3Da"),
        ("//evil.example/admin/", None),
        ("/admin/login", None),
    ):
        for headers in ({"Referer": gateway.url + page}, {"HX-Request": "true", "HX-Current-URL": gateway.url + page}):
            got = await gateway.nobody.call(
                "POST", "/admin/tenants/acme/edit", data={"weight": "2"}, headers=headers, allow_redirects=False
            )
            place = got.headers.get("Location") or got.headers["HX-Redirect"]
            assert place == ("/admin/login" if then is None else f"/admin/login?next={then}"), headers


async def test_malformed_addresses_lead_to_the_log_in_page(gateway: Gateway):
    given = {"HX-Request": "true", "HX-Current-URL": "http://["}
    got = await gateway.nobody.get("/admin/tenants", headers=given, allow_redirects=False)
    assert (got.status, got.headers["HX-Redirect"]) == (401, "/admin/login")
    assert (await gateway.nobody.get("/admin/login?next=//%5B")).status == 200


@pytest.mark.parametrize("given", ["/admin/", "/admin", "/admin/tenants?q=a%20b&sort=-name", "/admin/tenants/acme/"])
def test_the_way_back_is_kept(given: str):
    assert safe_next(given, "/admin") == given


async def test_a_link_from_another_site_keeps_the_session(gateway: Gateway):
    """A browser leaves a Strict cookie out after a click in an e-mail, and sends it after the page's reload."""
    async with gateway.browser(None) as browser:
        got = await browser.get("/admin/?period=7d&by=<", headers={"Sec-Fetch-Site": "cross-site"})
        assert got.status == 200
        page = got.body.decode()
        assert 'content="0;url=/admin/?period=7d&amp;by=' in page
        assert "<script" not in page
        assert "by=<" not in page


async def test_no_token_is_stored_or_logged(gateway: Gateway, caplog: pytest.LogCaptureFixture, tmp_path: Any):
    with caplog.at_level("DEBUG"):
        async with gateway.browser() as browser:
            token = browser.cookie() or ""
            await browser.get("/admin/")
    assert len(token) == 80
    assert token not in caplog.text
    assert ADMIN_KEY not in caplog.text
    for file in tmp_path.glob("gateway.db*"):
        content = file.read_bytes()
        assert token.encode() not in content
        assert PEPPER.encode() not in content
