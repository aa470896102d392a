"""Edits by form in two tabs: nobody undoes a change that the review did not show."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from testing.gateway.running import Browser, Gateway
from tests.gateway.pages.records import fields, send


@pytest.fixture
async def browser(gateway: Gateway) -> AsyncIterator[Browser]:
    async with gateway.browser() as browser:
        yield browser


async def tenant(gateway: Gateway, name: str = "odd") -> dict[str, Any]:
    return (await gateway.admin.get(f"/admin/api/tenants/{name}")).json


MODELS = {"base": {"max_concurrent": 2}, "*": {"requests_per_minute": 9}}


async def test_a_stale_tab_writes_its_own_changes_only(gateway: Gateway, browser: Browser):
    await gateway.tenant("odd", tokens_per_minute=8888, display_name="Odd", model_limits=MODELS)
    path = "/admin/tenants/odd/edit"
    stale = fields(await browser.get(path))
    assert stale["model_limits"].count("\r\n") == 1
    review = fields(await send(browser, path, stale | {"tokens_per_minute": "9,999"}))
    changes = {"requests_per_minute": 42, "display_name": "Odder"}
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/odd", json=changes)).status == 200
    saved = await send(browser, path, review | {"act": "save"})
    assert saved.headers["Location"].endswith("done=changed")
    now = await tenant(gateway)
    assert (now["tokens_per_minute"], now["requests_per_minute"], now["display_name"]) == (9999, 42, "Odder")
    assert now["model_limits"]["base"]["max_concurrent"] == 2
    [entry, _] = (await gateway.admin.get("/admin/api/audit?action=tenant.update")).json["data"]
    assert entry["detail"] == {"tokens_per_minute": 9999}
    # The form that was opened before both changes shows the present values after its own error.
    again = await send(browser, path, stale | {"weight": "much"})
    assert again.status == 400
    assert fields(again) | {"requests_per_minute": "42", "display_name": "Odder", "weight": "much"} == fields(again)


async def test_a_field_that_both_changed_is_a_conflict(gateway: Gateway, browser: Browser):
    await gateway.tenant("odd", tokens_per_minute=8888)
    path = "/admin/tenants/odd/edit"
    review = fields(await send(browser, path, fields(await browser.get(path)) | {"tokens_per_minute": "9,999"}))
    await gateway.admin.call("PATCH", "/admin/api/tenants/odd", json={"tokens_per_minute": 7777})
    for act in ("save", "edit"):
        conflict = await send(browser, path, review | {"act": act})
        assert conflict.status == 409
        assert re.search(r'id="e-tokens_per_minute">[^<]*present value is 7,777[^<]*9,999', conflict.body.decode())
    assert (await tenant(gateway))["tokens_per_minute"] == 7777
    known = fields(await send(browser, path, fields(conflict)))
    assert (await send(browser, path, known | {"act": "save"})).status == 303
    assert (await tenant(gateway))["tokens_per_minute"] == 9999


async def test_a_stale_budget_page_keeps_a_new_budget(gateway: Gateway, browser: Browser):
    await gateway.tenant("odd")
    stale = fields(await browser.get("/admin/tenants/odd/budget"))
    await gateway.admin.call("PATCH", "/admin/api/tenants/odd", json={"budget_per_month": 7_000_000})
    review = await send(browser, "/admin/tenants/odd/budget", stale | {"budget_per_day": "1"})
    assert "7.00" not in review.body.decode().split("<main")[1].split("<form")[0]
    assert (await send(browser, "/admin/tenants/odd/budget", fields(review) | {"act": "save"})).status == 303
    now = await tenant(gateway)
    assert (now["budget_per_month"], now["budget_per_day"]) == (7_000_000, 1_000_000)


async def test_a_stale_form_of_a_plan(gateway: Gateway, browser: Browser):
    plan: dict[str, Any] = {"requests_per_minute": 600, "prices": {"*": {"input": 5, "output": 7}}}
    await gateway.admin.call("PUT", "/admin/api/plans/gold", json=plan)
    path = "/admin/plans/gold"
    stale, prices = fields(await browser.get(path)), fields(await browser.get(f"{path}/prices"))
    plan |= {"requests_per_minute": 601, "prices": {"*": {"input": 6, "output": 7}}}
    changed = await gateway.admin.call("PUT", "/admin/api/plans/gold", json=plan)
    assert changed.status == 200, changed.body
    assert (await send(browser, path, stale | {"tokens_per_minute": "5k"})).status == 303
    assert (await send(browser, f"{path}/prices", prices | {"all_output": "0.000009"})).status == 303
    now = (await gateway.admin.get("/admin/api/plans/gold")).json
    assert (now["requests_per_minute"], now["tokens_per_minute"]) == (601, 5000)
    assert (now["prices"]["*"]["input"], now["prices"]["*"]["output"]) == (6, 9)
    conflict = await send(browser, path, stale | {"requests_per_minute": "602"})
    assert (conflict.status, 'id="e-requests_per_minute"' in conflict.body.decode()) == (409, True)
    conflict = await send(browser, f"{path}/prices", prices | {"all_input": "9"})
    assert (conflict.status, 'id="e-all_input"' in conflict.body.decode()) == (409, True)


@pytest.mark.parametrize("home", ["/admin", "/console"])
async def test_a_stale_form_of_a_key(gateway: Gateway, home: str):
    await gateway.tenant("acme")
    made = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["keys"]})).json
    path = f"{home}/keys/{made['id']}/edit"
    async with gateway.browser(made["key"] if home == "/console" else gateway.admin.key, home) as browser:
        stale = fields(await browser.get(path))
        changed = await gateway.admin.call("PATCH", f"/admin/api/keys/{made['id']}", json={"requests_per_minute": 3})
        assert changed.status == 200
        assert (await send(browser, path, stale | {"label": "mine"})).status == 303
        assert (await send(browser, path, stale | {"requests_per_minute": "4"})).status == 409
        assert (await send(browser, path, stale)).status == 303
    keys = (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"]
    [key] = [each for each in keys if each["id"] == made["id"]]
    assert (key["label"], key["requests_per_minute"]) == ("mine", 3)


async def test_an_untouched_label_keeps_its_outer_spaces(gateway: Gateway, browser: Browser):
    await gateway.tenant("acme")
    owner = "/admin/api/tenants/acme/keys"
    made = (await gateway.admin.post(owner, {"label": " ci "})).json
    path = f"/admin/keys/{made['id']}/edit"
    sent = await send(browser, path, fields(await browser.get(path)) | {"requests_per_minute": "7"})
    assert sent.status == 303
    found = {key["id"]: key for key in (await gateway.admin.get(owner)).json["data"]}[made["id"]]
    assert (found["label"], found["requests_per_minute"]) == (" ci ", 7)


async def test_a_stale_form_of_a_target(gateway: Gateway, browser: Browser):
    path = "/admin/alerts/pager"
    body: dict[str, Any] = {"url": "https://pager.example/in", "types": ["engine.down"]}
    assert (await gateway.admin.call("PUT", "/admin/api/webhooks/pager", json=body)).status == 201
    stale = fields(await browser.get(f"{path}/edit")) | {"types": "engine.down"}
    body["types"] = ["engine.down", "budget.soft"]
    assert (await gateway.admin.call("PUT", "/admin/api/webhooks/pager", json=body)).status == 200
    assert (await send(browser, f"{path}/edit", stale | {"url": "https://pager.example/two"})).status == 303
    shown = (await gateway.admin.get("/admin/api/webhooks/pager")).json
    assert sorted(shown["types"]) == ["budget.soft", "engine.down"]
    assert (await send(browser, f"{path}/edit", stale | {"types": "key.expiring"})).status == 409
