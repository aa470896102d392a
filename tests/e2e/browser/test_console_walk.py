"""The console in a real browser: a tenant's admin from an upload to the audit log, and members who may do less."""

import re
from pathlib import Path

import pytest

from testing.browser import Person, expect, person
from testing.gateway.running import Gateway
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import CONFIG, files, push

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALL = ["inference", "adapters", "usage", "keys"]
ADAPTER = "/console/adapters/pirate"
# Pages and changes that need a scope. {key}: the id of the member's own key.
READS = {
    "usage": ("/console/requests", "/console/usage"),
    "keys": ("/console/keys", "/console/keys/new", "/console/keys/{key}/rotate", "/console/audit"),
    "adapters": ("/console/adapters", ADAPTER, f"{ADAPTER}/confirm?act=delete", "/console/adapter-upload"),
    "inference": ("/console/playground",),
}
CHANGES = {
    "usage": (),
    "keys": ("/console/keys/new", "/console/keys/{key}/rotate", "/console/keys/{key}/revoke"),
    "adapters": (f"{ADAPTER}/act", "/console/adapter-upload"),
    "inference": ("/console/playground/chat",),
}
# Report each text of the upload's state, and the value of its progress bar.
WATCH = """() => {
    const state = document.getElementById("state"), bar = document.getElementById("progress");
    new MutationObserver(() => said(`${state.textContent} ${bar.value}`)).observe(state, {childList: true});
}"""
# Send a change from the page that is open, as a script of this origin could. Return the status.
POST = """async path => {
    const csrf = document.querySelector("input[name=csrf]").value;
    const fields = {csrf, act: "delete", typed: "pirate", grace: "0", scopes: "inference", expires: ""};
    return (await fetch(path, {method: "POST", body: new URLSearchParams(fields), redirect: "manual"})).status;
}"""


@pytest.fixture
def upstream(upstream: Upstream) -> Upstream:
    """Return the engine double, which probes adapters and accepts them."""
    upstream.probe_status = 200
    return upstream


async def key_of(gateway: Gateway, label: str, scopes: list[str]) -> dict[str, str]:
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"label": label, "scopes": scopes})
    assert made.status == 201, made.body
    return made.json


async def click(who: Person, text: str, within: str = "main") -> None:
    """Click the link or button with exactly this text."""
    await who.page.locator(f"{within} :is(a, button)").filter(has_text=re.compile(rf"^\s*{text}\s*$")).first.click()


async def upload(who: Person, folder: Path, content: dict[str, bytes]) -> None:
    """Send files by the form that is open."""
    for name, data in content.items():
        (folder / name).write_bytes(data)
    await who.page.set_input_files("#f-files", [folder / name for name in content])
    await click(who, "Upload")


async def push_two_versions(who: Person, folder: Path) -> None:
    """Upload a version, and one that is rejected, by the form. Check the progress and the reports."""
    said: list[str] = []

    # A method of a list cannot be exposed.
    def note(text: str) -> None:
        said.append(text)

    await who.page.expose_function("said", note)
    await click(who, "Models and adapters", "nav")
    await click(who, "Upload an adapter")
    await who.page.fill("#f-name", "pirate")
    await who.page.wait_for_load_state()  # the script sends the form
    await who.page.evaluate(WATCH)
    await upload(who, folder, files(1))
    await who.page.wait_for_url(f"**{ADAPTER}?version=1&done=upload")
    assert any(re.match(r"Received. It is being checked and probed. 1$", each) for each in said), said
    await who.sees("Requests for this name use version 1.")
    await who.sees("passed: it changes the base model's answers")
    await click(who, "Upload a version")
    await who.page.wait_for_selector("#f-files")
    await who.page.wait_for_load_state()
    await upload(who, folder, {**files(2), CONFIG: b'{"r": "<b>"}'})
    await who.page.wait_for_selector("#problem:visible")
    await who.sees("peft_type", "#problem")
    assert (await who.page.inner_text("#problem")).count("peft_type") == 1
    await who.open(f"{ADAPTER}?version=2")
    assert "It was rejected." in await who.text()


async def manage_a_key(who: Person, gateway: Gateway) -> None:
    """Create, rotate and revoke a key. Each secret is shown once."""
    await click(who, "Keys", "nav")
    await click(who, "New key")
    await who.page.fill("input[name=label]", "robot")
    await click(who, "Create")
    secrets = []
    for change in ("made", "rotated"):
        secrets.append(await who.page.locator(".narrow .copyable code").inner_text())
        await click(who, "Done")
        await who.page.wait_for_selector("tr:has-text('robot')")
        await who.page.wait_for_load_state()
        assert secrets[-1] not in await who.page.content()
        assert (await gateway.client(secrets[-1]).get("/v1/models")).status == 200
        if change == "made":
            await who.page.click("tr:has-text('robot') >> text=Rotate")
            await who.page.select_option("select[name=grace]", "0")
            await click(who, "Rotate")
    assert (await gateway.client(secrets[0]).get("/v1/models")).status == 401
    await who.page.click(f"tr:has-text('{secrets[1].split('_')[1]}') >> text=Revoke")
    await expect(who.page.locator("main button.danger")).to_be_disabled()
    await who.page.fill("input[name=typed]", "robot")
    await click(who, "Revoke")
    await who.page.wait_for_url("**/console/keys?done=revoked")
    assert (await gateway.client(secrets[1]).get("/v1/models")).status == 401


async def test_an_admin_uploads_asks_and_manages_keys(gateway, upstream, browser, tmp_path):
    await gateway.tenant("acme")
    admin = await key_of(gateway, "Ada", ALL)
    async with person(browser, gateway.url) as who:
        page = who.page
        await who.log_in("/console", admin["key"])
        assert "tenant admin" in await page.inner_text(".account summary")
        await push_two_versions(who, tmp_path)
        # The rejected upload was answered with 400, which the browser writes down.
        assert [each for each in who.problems if "status of 400" not in each] == []
        who.problems = []

        await click(who, "Try it")
        await page.fill("[name=prompt]", "Why is the sky blue?")
        await page.wait_for_load_state()  # the script sends the form
        await page.fill("[name=max_tokens]", "2")
        await page.click("#run")
        await page.wait_for_selector("#side-a [data-part=state]:text-is('complete')")
        assert await page.inner_text("#side-a .answer") == "aa"
        request_id = await page.get_attribute("#side-a [data-part=request] a", "title")
        # Both sides ask at once, the base model beside the adapter.
        assert sum(body["model"].startswith("sha256:") for _, body in upstream.requests) == 1

        for path, selector in (("requests", f"a[href$='{request_id}']"), ("usage?by=model", "tr:has-text('pirate')")):
            await who.find(f"/console/{path}", selector)
        await who.open(f"/console/requests/{request_id}")
        assert "completed" in await who.text()

        await manage_a_key(who, gateway)
        await click(who, "Audit", "nav")
        for action in ("adapter.push", "key.create", "key.rotate", "key.revoke"):
            await expect(page.locator(f"tr:has-text('{action}')").first).to_be_visible()
        assert who.problems == []


async def test_a_member_sees_and_does_what_its_scopes_allow(gateway, upstream, browser):
    acme = await gateway.tenant("acme")
    assert (await push(acme, "pirate", files(1))).status == 201
    for scope in ("inference", "usage", "adapters"):
        member = await key_of(gateway, scope, [scope])
        async with person(browser, gateway.url) as who:
            await who.log_in("/console", member["key"])
            assert "tenant member" in await who.page.inner_text(".account summary")
            await check_links(who)
            for needed, paths in READS.items():
                for path in paths:
                    answer = await who.context.request.get(who.url + path.format(key=member["id"]))
                    assert answer.status == (200 if needed == scope else 403), (scope, path)
            assert who.problems == []
            for needed, paths in CHANGES.items():
                for path in paths if needed != scope else ():
                    status = await who.page.evaluate(POST, path.format(key=member["id"]))
                    assert status == 403, (scope, path, status)
    kept = (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"]
    assert len(kept) == 4
    assert all(key["revoked_at"] is None for key in kept)
    assert (await acme.get("/v1/adapters/pirate")).status == 200


async def check_links(who: Person) -> None:
    """Open each page of the navigation, and check that every link on it leads to a page that the person may see."""
    pages = await who.page.locator("nav a").evaluate_all("every => every.map(each => each.pathname)")
    links = set()
    for path in pages:
        await who.open(path)
        links |= set(
            await who.page.locator("a[href]").evaluate_all(
                "every => every.filter(each => each.origin === origin).map(each => each.pathname + each.search)"
            )
        )
    for link in links - set(pages):
        answer = await who.context.request.get(who.url + link)
        assert answer.status == 200, (link, answer.status)
