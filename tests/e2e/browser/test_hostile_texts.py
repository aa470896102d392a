"""Texts that tenants and people choose are inert on every page, in a real browser.

The pages come from the table of routes: each is opened as it is, and once more with such a text in every parameter.
"""

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, urlencode

import pytest

from testing.browser import Person, person
from testing.gateway.running import ADMIN_KEY, Gateway, until
from testing.gateway.upstream import Upstream
from tests.e2e.browser.pages import pages_below, path_of
from tests.gateway.api.adapters.test_adapters import CONFIG, files, push

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Each would set `marked`, open a dialog or count, if a page took it for markup, for a script or for a template.
HOSTILE = (
    "<script>marked=1;alert(1)</script>",
    """"'><img src=x onerror="marked=1;alert(1)">""",
    "javascript:marked=1,alert(1)",
    "{{1234*4321}}",
)
ALL = "".join(HOSTILE)
# At most 64 characters, of the second kind and the last.
SHORT = """"'><img src=x onerror=alert(1)>{{1234*4321}}"""
COUNTED = str(1234 * 4321)
# Markup that no template contains. Links to other schemes than HTTP count too.
INJECTED = """[...document.querySelectorAll("*")].filter(each =>
    each.matches("script:not([src]), iframe, object, embed") ||
    [...each.attributes].some(one => /^on/.test(one.name)) ||
    ["href", "src", "action"].some(name => /^\\s*(javascript|data):/i.test(each.getAttribute(name) || ""))
).map(each => each.outerHTML.slice(0, 200))"""
# A page's markup of that kind, whether a script has run, the source, and the visible text, in one step.
READ = f"[{INJECTED}, window.marked, document.documentElement.outerHTML, document.body.innerText]"


async def fill(gateway: Gateway, upstream: Upstream) -> dict[str, str]:
    """Write such texts wherever somebody may write any text. Return the values of the paths' parameters."""
    await gateway.tenant("acme", display_name=SHORT, note=ALL, contact=ALL, external_id=SHORT)
    fields = {"label": SHORT, "scopes": ["inference", "adapters", "usage", "keys"]}
    key = (await gateway.admin.post("/admin/api/tenants/acme/keys", fields)).json
    owner = gateway.client(key["key"])
    assert (await gateway.admin.post("/admin/api/keys", {"label": SHORT, "role": "viewer"})).status == 201
    assert (await gateway.admin.call("PUT", "/admin/api/plans/pro", json={})).status == 200
    price = {"input": 1, "output": 1}
    priced = await gateway.admin.call("PUT", f"/admin/api/prices/{quote(SHORT, safe='')}?force=true", json=price)
    assert priced.status == 200, priced.body
    content = files(1)
    about = json.loads(content[CONFIG]) | {"base_model_name_or_path": ALL, "revision": ALL}
    pushed = await push(owner, "pirate", content | {CONFIG: json.dumps(about).encode()})
    assert pushed.status == 201, pushed.body
    assert (await push(owner, ALL, content)).status == 400
    assert (await push(owner, "wrong", content | {CONFIG: json.dumps(about | {ALL: ALL}).encode()})).status == 400
    assert (await owner.chat(model="pirate", user=SHORT, messages=[{"role": "user", "content": ALL}])).status == 200
    assert (await owner.chat(model=HOSTILE[1])).status == 404
    assert (await owner.chat(user=SHORT, x_engine={"status": 400})).status == 400
    upstream.version = SHORT

    async def is_recorded() -> bool:
        return len((await gateway.admin.get("/admin/api/requests?tenant=acme")).json["data"]) >= 3

    await until(is_recorded)
    requests = (await gateway.admin.get("/admin/api/requests?tenant=acme")).json["data"]
    return {
        "tenant": "acme",
        "plan": "pro",
        "act": "drain",
        "model": quote(SHORT, safe=""),
        "name": "pirate",
        "id": key["id"],
        "secret": key["key"],
        "requests/id": requests[0]["request_id"],
        # All requests: answered, refused by the gateway, refused by the engine.
        "requests": " ".join(each["request_id"] for each in requests),
    }


def urls(home: str, known: dict[str, str]) -> Iterator[str]:
    """Yield every page below `home`, and once more with hostile parameters if it has any."""
    for route in pages_below(home):
        if route.scope != "page" or route.path.endswith("/events"):
            continue
        path = path_of(route, known)
        yield path
        if parameters := {name: ALL for name in route.query or () if name != "format"}:
            yield f"{path}?{urlencode(parameters)}"


async def check(who: Person, path: str) -> tuple[list[str], str]:
    """Open a page and return its faults and its text. An error page for a wrong parameter is right."""
    await who.open(path)
    found = [
        each
        for each in who.problems
        if not re.search(r"status of 4(?:0[0-9]|10)|does not conform to the required format", each)
    ]
    who.problems = []
    injected, marked, source, text = await who.page.evaluate(READ)
    found += injected
    if marked:
        found.append("a script ran")
    if COUNTED in source:
        found.append("a template counted")
    return [f"{path}: {each}" for each in found], text


async def test_hostile_texts_are_inert_on_every_page(gateway, upstream, browser):
    known = await fill(gateway, upstream)
    found: list[str] = []
    shown, stories = 0, ""
    for home, key in (("/admin", ADMIN_KEY), ("/console", known["secret"])):
        async with person(browser, gateway.url, is_painted=False) as who:
            await who.log_in(home, key)
            for page in urls(home, known):
                faults, text = await check(who, page)
                found += faults
                shown += "?" not in page and SHORT in text
            for request_id in (*known["requests"].split(), quote(HOSTILE[1])):
                faults, text = await check(who, f"{home}/requests/{request_id}")
                found += faults
                stories += text
    assert not found, "\n".join(found)
    # The texts were there, as texts: in requests, the end user and the unknown model.
    assert shown >= 5
    assert SHORT in stories
    assert HOSTILE[1] in stories


async def test_a_prompt_and_its_answer_are_text_in_the_playground(gateway, upstream, browser):
    await gateway.tenant("acme")
    upstream.says = (ALL,)
    async with person(browser, gateway.url) as who:
        await who.log_in("/admin", ADMIN_KEY)
        await who.open(f"/admin/playground?tenant=acme&a=base&b={quote(ALL)}")
        await who.page.fill("[name=prompt]", SHORT)
        await who.page.fill("[name=max_tokens]", "2")
        await who.page.click("#run")
        await who.page.wait_for_selector("#side-a [data-part=state]:text-is('complete')")
        await who.page.wait_for_selector("#side-b [data-part=error]:visible")
        assert await who.page.locator("#side-a [data-part=answer]").inner_text() == ALL + ALL
        assert HOSTILE[0] in await who.page.locator("#side-b [data-part=error]").inner_text()
        assert await who.page.evaluate(INJECTED) == []
        assert [each for each in who.problems if "status of 400" not in each] == []
