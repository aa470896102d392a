"""A tenant's session at every page: nothing of another tenant, no operator's page, no forged change."""

import re
from collections.abc import AsyncIterator

import pytest

from gateway.api.route import Route
from gateway.route_table import ROUTES
from testing.gateway.running import HI, Answer, Browser, Gateway, until
from tests.gateway.api.adapters.test_adapters import files, push

CONSOLE = [route for route in ROUTES if route.scope == "page" and route.path.startswith("/console")]
OPERATORS = [route for route in ROUTES if route.scope == "page" and route.path.startswith("/admin")]
SECRET = "treasure"
ALL = ["inference", "adapters", "usage", "keys"]
# A stream without an end; its content is the strip (test_live.py).
STREAMS = {"/console/events"}


class Stage:
    """Two tenants with one adapter each. browsers: an admin's and a member's session of acme."""

    def __init__(self, gateway: Gateway, browsers: list[Browser], key_id: str, request_id: str) -> None:
        self.gateway, self.browsers, self.key_id, self.request_id = gateway, browsers, key_id, request_id

    def path(self, route: Route) -> str:
        """Return the route's path with the other tenant's names."""
        values = {"tenant": "globex", "name": SECRET, "model": SECRET, "plan": "gold", "act": "drain"}
        values |= {"id": self.request_id if "/requests/" in route.path else self.key_id}
        return re.sub(r"{(\w+)}", lambda found: values[found[1]], route.canonical)

    def leaks(self, answer: Answer, path: str) -> list[str]:
        """Return the names of the other tenant in an answer, beside those that the path itself had."""
        shown = answer.body.decode(errors="replace") + str(dict(answer.headers))
        for known in sorted({*re.split("[/?]", path), path}, key=len, reverse=True):
            shown = (
                shown.replace(known, "") if known in (SECRET, self.key_id, self.request_id, "globex", path) else shown
            )
        return [name for name in (SECRET, "globex", "their label", "their user", self.key_id) if name in shown]


@pytest.fixture
async def stage(gateway: Gateway) -> AsyncIterator[Stage]:
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    assert (await push(acme, "mine", files(1))).status == 201
    assert (await push(globex, SECRET, files(2))).status == 201
    answered = await globex.complete(model=SECRET, user="their user")
    request_id = answered.headers["x-request-id"]
    made = await gateway.admin.post("/admin/api/tenants/globex/keys", {"label": "their label"})

    async def settled() -> bool:
        return bool(await globex.usage())

    await until(settled)
    of_admin = await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ALL})
    async with (
        gateway.browser(of_admin.json["key"], "/console") as admin,
        gateway.browser(acme.key, "/console") as member,
    ):
        yield Stage(gateway, [admin, member], made.json["id"], request_id)


async def test_no_page_shows_another_tenants_records(stage: Stage):
    queries = (
        "",
        "?q=e",
        "?action=adapter",
        "?status=ok",
        "?a=mine&b=mine",
        "?by=key",
        "?by=model",
        "?format=csv",
        *(f"?by={by}" for by in ("hour", "month", "end_user")),
        *(f"?by={by}&format={form}" for by in ("key", "end_user", "model") for form in ("csv", "json", "parquet")),
    )
    found = {}
    for browser in stage.browsers:
        for route in CONSOLE:
            if route.path in STREAMS or route.path.endswith("/logout"):
                continue
            path = stage.path(route)
            for query in queries if route.method == "GET" else ("",):
                if any(name not in (route.query or ()) for name in re.findall(r"(\w+)=", query)):
                    continue
                fields = {"act": "delete", "typed": SECRET, "grace": "0", "scopes": "inference", "expires": ""}
                if route.method == "GET":
                    answer = await browser.get(path + query)
                else:
                    answer = await browser.submit(path, **fields)
                if leaked := stage.leaks(answer, path + query):
                    found[route.method, path + query] = (answer.status, leaked)
                if "{" in route.path:
                    assert answer.status in (400, 403, 404, 410), (route.method, path, answer.status)
    assert not found
    # And nothing of it has changed.
    globex = (await stage.gateway.admin.get("/admin/api/tenants/globex/adapters")).json["data"]
    assert [each["name"] for each in globex] == [SECRET]
    keys = (await stage.gateway.admin.get("/admin/api/tenants/globex/keys")).json["data"]
    assert all(key["revoked_at"] is None for key in keys)


async def test_another_tenants_things_and_absent_ones_look_alike(stage: Stage):
    [admin, _] = stage.browsers
    pairs = (
        (f"/console/adapters/{SECRET}", "/console/adapters/nothingx"),
        (f"/console/keys/{stage.key_id}/revoke", f"/console/keys/{'0' * 16}/revoke"),
        (f"/console/requests/{stage.request_id}", f"/console/requests/{'req_' + '0' * (len(stage.request_id) - 4)}"),
    )
    for theirs, absent in pairs:
        answers = []
        for path in (theirs, absent):
            answer = await admin.get(path)
            assert answer.status == 404, path
            name = path.removesuffix("/revoke").rpartition("/")[2]
            text = re.sub(r"req_\w+", "", answer.body.decode().replace(name, "NAME"))
            answers.append(text)
        assert answers[0] == answers[1]


async def test_operators_pages_are_closed(stage: Stage):
    for browser in stage.browsers:
        for cookie in browser.session.cookie_jar:
            # Even if the browser sent the console's cookie there.
            cookie["path"] = "/"
        token = browser.cookie() or next(c.value for c in browser.session.cookie_jar if c.key == "loraplex_session")
        for route in OPERATORS:
            path = stage.path(route)
            answer = await browser.call(route.method, path, headers={"Cookie": f"loraplex_session={token}"})
            assert answer.status == 303, (route.method, path, answer.status)
            assert answer.headers["Location"].startswith("/admin/login")
            assert not stage.leaks(Answer(answer.status, {}, answer.body), path)


async def test_forms_without_the_sessions_value_are_refused(stage: Stage):
    for browser in stage.browsers:
        for route in CONSOLE:
            if route.method == "GET":
                continue
            for fields in ({}, {"csrf": "0" * 64}):
                answer = await browser.call("POST", stage.path(route), data=fields or None)
                assert answer.status == 403, route.path
                assert answer.error["code"] == "csrf_mismatch"
            forged = {"csrf": await browser.csrf()}
            answer = await browser.call(
                "POST", stage.path(route), data=forged, headers={"Sec-Fetch-Site": "cross-site"}
            )
            assert answer.error["code"] == "csrf_mismatch"
        assert (await browser.get("/console/")).status == 200


async def test_a_suspended_tenants_sessions_end_at_once(stage: Stage):
    for browser in stage.browsers:
        assert (await browser.get("/console/")).status == 200
    await stage.gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})
    for browser in stage.browsers:
        for route in CONSOLE:
            answer = await browser.call(route.method, stage.path(route))
            assert (answer.status, answer.headers["Location"][:14]) == (303, "/console/login"), route.path
        refused = await browser.log_in("lpx_" + "0" * 16 + "_" + "0" * 48)
        assert refused.status == 401


async def test_the_playground_asks_own_models_only(stage: Stage):
    [admin, member] = stage.browsers
    made = await stage.gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["usage"]})
    page = (await admin.get("/console/playground")).body.decode()
    assert '<option value="mine">' in page
    headers = {"x-csrf": await admin.csrf()}
    for model, status in (("mine", 200), ("base", 200), (SECRET, 404), (f"globex/{SECRET}", 404)):
        body = {"model": model, "messages": HI}
        answer = await admin.call("POST", "/console/playground/chat", json=body, headers=headers)
        assert answer.status == status, (model, answer.body)
    body = {"model": "mine", "messages": HI}
    assert (await member.call("POST", "/console/playground/chat", json=body)).error["code"] == "csrf_mismatch"
    async with stage.gateway.browser(made.json["key"], "/console") as reader:
        headers = {"x-csrf": await reader.csrf()}
        refused = await reader.call("POST", "/console/playground/chat", json=body, headers=headers)
        assert refused.error["code"] == "insufficient_permissions"
        assert (await reader.get("/console/playground")).status == 403
        for path in ("/console/adapters", "/console/adapters/mine", "/console/adapter-upload"):
            assert (await reader.get(path)).status == 403, path
        headers |= {"Content-Type": "multipart/form-data; boundary=x"}
        refused = await reader.call("POST", "/console/adapter-upload", data=b"--x--\r\n", headers=headers)
        assert refused.error["code"] == "insufficient_permissions"


async def test_an_adapter_from_upload_to_deletion(stage: Stage):
    [admin, _] = stage.browsers
    boundary = b"frontier"
    parts = [("name", None, b"fresh"), *((name, name, content) for name, content in files(3).items())]
    body = b""
    for name, filename, content in parts:
        file = f'; filename="{filename}"' if filename else ""
        body += b"--" + boundary + f'\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        body += content + b"\r\n"
    body += b"--" + boundary + b"--\r\n"
    headers = {"x-csrf": await admin.csrf(), "Content-Type": "multipart/form-data; boundary=frontier"}
    made = await admin.call("POST", "/console/adapter-upload", data=body, headers=headers)
    assert made.status == 201, made.body
    again = await admin.call("POST", "/console/adapter-upload", data=body.replace(b"fresh", b"no"), headers=headers)
    assert again.status == 201
    listed = (await admin.get("/console/adapters")).body.decode()
    assert all(f'href="/console/adapters/{name}"' in listed for name in ("fresh", "mine", "no"))
    broken = body.replace(b'"r"', b'"x"', 1)
    refused = await admin.call("POST", "/console/adapter-upload", data=broken, headers=headers)
    assert refused.status == 400
    assert refused.error["message"]
    for tab in ("versions", "use", "changes"):
        page = (await admin.get(f"/console/adapters/fresh?tab={tab}")).body.decode()
        assert "/admin/" not in page
        assert "127.0.0.1:" not in page.replace(stage.gateway.url, "")
    wrong = await admin.submit("/console/adapters/fresh/act", act="delete", typed="fres")
    assert wrong.status in (200, 400)
    assert (await admin.get("/console/adapters/fresh")).status == 200
    done = await admin.submit("/console/adapters/fresh/act", act="delete", typed="fresh")
    assert (done.status, done.headers["Location"]) == (303, "/console/adapters")
    assert (await admin.get("/console/adapters/fresh")).status == 404
