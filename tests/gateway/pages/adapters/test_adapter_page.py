"""An adapter's page: its versions, aliases, reports, residency, use and changes, and the actions on them."""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.records.adapters.use import AdapterUses
from gateway.records.tenants.tenants import Tenant
from testing.adapter_files import CONFIG as PEFT_CONFIG
from testing.gateway.running import Browser, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import CONFIG, WEIGHTS, files, push

HOME = "/admin/tenants/acme/adapters/pirate"
ALIASES = "/v1/adapters/pirate/aliases"
HOSTILE = "<img src=x onerror=alert(1)>\"'"


async def act(browser: Browser, name: str, **fields: str) -> tuple[int, str]:
    """Send a form of the page. Returns the status, and where it leads or what it says."""
    answer = await browser.submit(f"{HOME}/act", act=name, **fields)
    return answer.status, answer.headers.get("Location") or answer.body.decode()


async def test_the_page_shows_versions_reports_and_residency(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    digests = [(await push(acme, "pirate", files(seed))).json["digest"] for seed in (1, 2)]
    refused = await push(acme, "pirate", {**files(3), CONFIG: f'{{"peft_type": "{"<b>"}"}}'.encode()})
    assert refused.status == 400
    targets = {"targets": [{"version": 1, "weight": 1}, {"version": 2, "weight": 3}]}
    assert (await acme.call("PUT", f"{ALIASES}/prod", json=targets)).status == 201
    upstream.resident = [digests[1]]
    async with gateway.browser() as browser:

        async def resident() -> bool:
            return "cell cell-device" in (await browser.get(HOME)).body.decode()

        await until(resident)
        text = (await browser.get(HOME)).body.decode()
        assert "Requests for this name use version 2." in text
        assert re.findall(r'version=(\d)">version \d</a> <b>(\S+) %', text) == [("2", "100"), ("2", "75"), ("1", "25")]
        assert digests[1] in text
        assert upstream.url in text
        rejected = (await browser.get(HOME, params={"version": "3"})).body.decode()
        assert "It was rejected." in rejected
        assert "<b>&#34;" not in rejected
        for query, status in (("version=9", 404), ("version=x", 404), ("tab=none", 400), ("tab=use&period=1y", 400)):
            assert (await browser.get(f"{HOME}?{query}")).status == status, query
        for tab in ("use", "changes"):
            assert (await browser.get(HOME, params={"tab": tab})).status == 200
        assert "uploaded" in (await browser.get(HOME, params={"tab": "changes"})).body.decode()
        assert (await browser.get(HOME.replace("pirate", "none"))).status == 404
        assert (await browser.get(HOME.replace("acme", "none"))).status == 404


async def test_an_alias_is_moved_and_rolled_back(gateway: Gateway):
    acme = await gateway.tenant("acme")
    for seed in (1, 2):
        assert (await push(acme, "pirate", files(seed))).status == 201
    async with gateway.browser() as browser:
        made = await act(browser, "move", alias="prod", version_0="1", version_1="2", weight_0="9", weight_1="1")
        assert made == (303, f"{HOME}?done=move")
        form = (await browser.get(f"{HOME}/alias", params={"alias": "prod"})).body.decode()
        [etag] = re.findall(r'name="etag" value="(\S+?)"', form)
        etag = etag.replace("&#34;", '"')
        assert await act(browser, "move", alias="prod", etag=etag, version_0="2") == (303, f"{HOME}?done=move")
        # The form's state is over.
        status, text = await act(browser, "move", alias="prod", etag=etag, version_0="1")
        assert (status, "prod is version 2" in text) == (412, True)
        status, text = await act(browser, "move", alias=HOSTILE, version_0="1")
        assert (status, "<img" in text) == (400, False)
        asked = (await browser.get(f"{HOME}/confirm", params={"act": "rollback", "alias": "prod"})).body.decode()
        assert "version 2 (100 %)" in asked
        assert "version 1 (90 %), version 2 (10 %)" in asked
        [etag] = re.findall(r'name="etag" value="(\S+?)"', asked)
        rolled = await act(browser, "rollback", alias="prod", etag=etag.replace("&#34;", '"'))
        assert rolled == (303, f"{HOME}?done=rollback")
        [prod] = [each for each in (await acme.get(ALIASES)).json["data"] if each["alias"] == "prod"]
        assert [(target["version"], target["weight"]) for target in prod["targets"]] == [(1, 9), (2, 1)]
        status, text = await act(browser, "rollback", alias="prod")
        assert (status, "no earlier state" in text) == (400, True)


async def test_destructive_actions_need_the_name(gateway: Gateway):
    acme = await gateway.tenant("acme")
    for seed in (1, 2):
        assert (await push(acme, "pirate", files(seed))).status == 201
    async with gateway.browser() as browser:

        async def states() -> dict[int, str]:
            found = await acme.get("/v1/adapters/pirate/versions")
            return {each["version"]: each["state"] for each in found.json["data"]}

        for name, fields in (("retire", {"version": "1"}), ("delete_version", {"version": "1"}), ("delete", {})):
            for typed in ("", "pirates"):
                assert (await act(browser, name, typed=typed, **fields))[0] == 400
        assert await states() == {1: "ready", 2: "ready"}
        retired = await act(browser, "retire", version="1", typed="pirate@1")
        assert retired == (303, f"{HOME}?done=retire&version=1")
        assert (await act(browser, "ready", version="1"))[0] == 303
        assert (await act(browser, "pin", version="1"))[0] == 303
        assert "pinned" in (await browser.get(HOME, params={"version": "1"})).body.decode()
        assert (await act(browser, "expire", version="1", expires_at="2020-01-01T00:00"))[0] == 400
        assert (await act(browser, "expire", version="1", expires_at="soon"))[0] == 400
        assert (await act(browser, "expire", version="1", expires_at="2099-01-01T00:00"))[0] == 303
        # An alias refers to the version: it is deleted only by force, which the second page offers.
        status, text = await act(browser, "delete_version", version="2", typed="pirate@2")
        assert (status, 'name="force" value="true"' in text, "in use by alias" in text) == (400, True, True)
        assert (await act(browser, "delete_version", version="2", typed="pirate@2", force="true"))[0] == 303
        assert (await states())[2] == "deleted"
        assert await act(browser, "delete", typed="pirate") == (303, "/admin/adapters?tenant=acme")
        assert (await acme.get("/v1/adapters/pirate")).status == 404
        actors = (await gateway.admin.get("/admin/api/audit", params={"action": "adapter.delete"})).json["data"]
        assert {each["actor"] for each in actors} == {"bootstrap"}


async def test_the_page_takes_the_years_that_the_api_takes(gateway: Gateway):
    acme = await gateway.tenant("acme")
    assert (await push(acme, "pirate", files(1))).status == 201
    async with gateway.browser() as browser:
        for moment, statuses in (("8999-06-01T00:00", (200, 303)), ("9000-06-01T00:00", (400, 400))):
            given = {"expires_at": f"{moment}:00Z"}
            asked = await acme.call("PATCH", "/v1/adapters/pirate/versions/1", json=given)
            acted = await act(browser, "expire", version="1", expires_at=moment)
            assert (asked.status, acted[0]) == statuses, moment
        assert "expected a year" in acted[1]


async def test_a_version_is_brought_to_an_engines_memory(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    digest = (await push(acme, "pirate", files(1))).json["digest"]
    async with gateway.browser() as browser:
        assert "Load into host memory" in (await browser.get(HOME)).body.decode()
        done = await act(browser, "prefetch", version="1", engine=upstream.url)
        assert done == (303, f"{HOME}?done=prefetch&version=1")
        assert upstream.hints[-1][0] == digest
        text = (await browser.get(HOME)).body.decode()
        assert "host memory" in text
        assert "Load into host memory" not in text
        status, text = await act(browser, "prefetch", version="1", engine=HOSTILE)
        assert (status, "<img" in text) == (400, False)


async def test_an_upload_by_form_is_that_of_the_api(gateway: Gateway, tmp_path: Path):
    await gateway.tenant("acme")
    async with gateway.browser() as browser:
        path = "/admin/tenants/acme/adapter-upload"
        assert "The largest rank is 64." in (await browser.get(path)).body.decode()
        assert 'value="pirate"' in (await browser.get(path, params={"name": "pirate"})).body.decode()
        headers = {"x-csrf": await browser.csrf()}

        def body(content: dict[str, bytes]) -> aiohttp.FormData:
            form = aiohttp.FormData({"name": "pirate"})
            for name, data in content.items():
                form.add_field(name, data, filename=name)
            return form

        made = await browser.call("POST", path, data=body(files(1)), headers=headers)
        assert (made.status, made.json["version"]) == (201, 1), made.body
        markup = dict(PEFT_CONFIG, base_model_name_or_path=HOSTILE, peft_type=HOSTILE)
        refused = await browser.call(
            "POST", path, data=body({**files(2), CONFIG: str(markup).replace("'", '"').encode()}), headers=headers
        )
        assert refused.status == 400
        forged = await browser.call("POST", path, data=body(files(3)))
        assert forged.error["code"] == "csrf_mismatch"
        shown = (await browser.get(HOME, params={"version": "2"})).body.decode()
        assert "It was rejected." in shown
        assert "<img" not in shown
        assert WEIGHTS not in shown


async def test_readers_see_the_page_and_change_nothing(gateway: Gateway):
    acme = await gateway.tenant("acme")
    assert (await push(acme, "pirate", files(1))).status == 201
    made = await gateway.admin.post("/admin/api/keys", {"role": "viewer", "label": "reader"})
    async with gateway.browser(made.json["key"]) as reader:
        text = (await reader.get(HOME)).body.decode()
        assert "Requests for this name use version 1." in text
        assert "/act" not in text
        assert "/confirm" not in text
        assert (await act(reader, "retire", version="1", typed="pirate@1"))[0] == 403
        for path in (f"{HOME}/confirm?act=delete", f"{HOME}/alias", "/admin/tenants/acme/adapter-upload"):
            assert (await reader.get(path)).status == 403


async def test_the_navigation_marks_what_the_breadcrumb_of_a_page_says(gateway: Gateway):
    acme = await gateway.tenant("acme")
    assert (await push(acme, "pirate", files(1))).status == 201
    below = {
        HOME: "Adapters",
        f"{HOME}/alias": "Adapters",
        "/admin/tenants/acme/adapter-upload": "Adapters",
        "/admin/tenants/acme/keys/new": "Keys",
        "/admin/tenants/acme": "Tenants",
        "/admin/tenants/acme/edit": "Tenants",
    }
    async with gateway.browser() as browser:
        for path, title in below.items():
            text = (await browser.get(path)).body.decode()
            assert re.findall(r'aria-current="page">(?:(?!</a>).)*<span>([^<]+)</span></a>', text) == [title], path
            assert re.search(rf'class="crumbs"><a href="[^"]+">{title}</a>', text), path


async def test_a_tenants_readers_of_the_page_take_turns(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """Each read scans many rows over a connection of the database, which has few."""
    running, most, go_on = Counter[str](), Counter[str](), asyncio.Event()
    read = AdapterUses.changes

    async def changes(uses: AdapterUses, tenant: Tenant, name: str, **options: Any) -> Any:
        running[tenant.name] += 1
        most[tenant.name] = max(most[tenant.name], running[tenant.name])
        await go_on.wait()
        running[tenant.name] -= 1
        return await read(uses, tenant, name, **options)

    monkeypatch.setattr(AdapterUses, "changes", changes)
    keys = list[str]()
    for name in ("acme", "globex"):
        tenant = await gateway.tenant(name)
        assert (await push(tenant, "pirate", files(1))).status == 201
        keys.append(tenant.key or "")
    page = "/console/adapters/pirate"
    async with (
        gateway.browser(keys[0], "/console") as acme,
        gateway.browser(keys[1], "/console") as globex,
        gateway.browser() as operator,
    ):
        asked = [acme.get(page, params={"tab": tab}) for tab in ("versions", "changes") for _ in range(3)]
        read_pages = asyncio.gather(*asked, globex.get(page), *(operator.get(HOME) for _ in range(3)))

        async def all_others_read() -> bool:
            return running["globex"] == 1 and running["acme"] >= 4

        await until(all_others_read)
        go_on.set()
        assert {answer.status for answer in await read_pages} == {200}
    # The three of operators, and one of the tenant.
    assert most["acme"] == 4
