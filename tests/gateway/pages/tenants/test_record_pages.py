"""Pages of tenants, keys, plans, prices and the audit log, in a real gateway."""

import csv
import re
from collections.abc import AsyncIterator

import pytest

from testing.gateway.running import Answer, Browser, Gateway, until

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


@pytest.fixture
async def browser(gateway: Gateway) -> AsyncIterator[Browser]:
    async with gateway.browser() as browser:
        yield browser


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return answer.body.decode()


def check_inert(page: str) -> None:
    assert "<script>alert" not in page
    assert "<img src=x" not in page


async def role(gateway: Gateway, name: str) -> str:
    return (await gateway.admin.post("/admin/api/keys", {"role": name, "label": name})).json["key"]


def check_preview(preview: str) -> None:
    """Check the table of changes: each field with its value before and after."""
    found = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", preview.split("<main")[1], re.DOTALL)
    cells = [re.sub(r"<[^>]*>", "", cell) for cell in found]
    rows = {cells[i]: cells[i + 1 : i + 3] for i in range(3, len(cells), 3)}
    assert rows == {
        "Prompt and output tokens per minute": ["60,000", "200,000 (inherited)"],
        "Soft budget of the last 30 days, today included (UTC)": ["none (inherited)", "7.50"],
        "Weight": ["1 (inherited)", "2"],
        "Events at shares of budgets": ["80 %, 100 % (inherited)", "50 %, 90 %"],
        "Limits of single models": [
            "none (inherited)",
            "base: max_concurrent=2 budget_per_month=1.50\n*: tokens_per_day=60000",
        ],
    }


async def check_mistakes(browser: Browser, fields: dict[str, str]) -> None:
    """Check that each wrong value is an error beside its field."""
    for field, value in (
        ("model_limits", "nothing: max_concurrent=2"),
        ("model_limits", "base max_concurrent=2"),
        ("model_limits", "base: max_adapters=2"),
        ("model_limits", "base: max_concurrent=many"),
        ("model_limits", "base: max_concurrent=0"),
        ("budget_warn_at", "0.5"),
        ("budget_per_30_days", "much"),
    ):
        wrong = await browser.submit("/admin/tenants/acme/edit", **fields | {field: value})
        assert (wrong.status, f'id="e-{field}"' in wrong.body.decode()) == (400, True), value


async def check_the_end(gateway: Gateway, browser: Browser) -> None:
    """Suspend acme, resume and delete it, and find the acts in the audit."""
    acme = gateway.client((await gateway.admin.post("/admin/api/tenants/acme/keys")).json["key"])
    assert 'name="typed"' in text(await browser.get("/admin/tenants/acme/suspend"))
    assert (await browser.submit("/admin/tenants/acme/suspend", typed="acm")).status == 400
    assert (await acme.chat()).status == 200
    assert (await browser.submit("/admin/tenants/acme/suspend", typed="acme")).status == 303
    assert (await acme.chat()).error["code"] == "tenant_suspended"
    assert (await browser.submit("/admin/tenants/acme/resume")).status == 303
    assert (await acme.chat()).status == 200
    assert (await browser.submit("/admin/tenants/acme/delete", typed="acme")).status == 303
    assert (await browser.get("/admin/tenants/acme")).status == 404
    actions = [row["action"] for row in (await gateway.admin.get("/admin/api/audit?tenant=acme")).json["data"]]
    assert actions[:3] == ["tenant.delete", "tenant.resume", "tenant.suspend"]


async def test_a_tenant_from_its_form_to_its_end(gateway: Gateway, browser: Browser):
    assert "There are no tenants yet" in text(await browser.get("/admin/tenants"))
    assert 'name="tokens_per_minute"' in text(await browser.get("/admin/tenants/-/new"))
    wrong = await browser.submit("/admin/tenants/-/new", name="Bad Name", tokens_per_minute="many", note=HOSTILE)
    page = wrong.body.decode()
    assert wrong.status == 400
    assert 'id="e-tokens_per_minute"' in page
    assert 'value="many"' in page
    check_inert(page)
    refused = await browser.submit("/admin/tenants/-/new", name="Bad Name")
    assert 'id="e-name"' in refused.body.decode()
    fields = {"tokens_per_minute": "60k", "budget_per_month": "12.50", "tags": "eu, trial", "tokens_per_day": "none"}
    fields |= {"display_name": HOSTILE, "note": HOSTILE, "contact": HOSTILE, "external_id": HOSTILE}
    made = await browser.submit("/admin/tenants/-/new", name="acme", **fields)
    assert (made.status, made.headers["Location"]) == (303, "/admin/tenants/acme?done=created")
    shown = (await gateway.admin.get("/admin/api/tenants/acme")).json
    expected = {"tokens_per_minute": 60_000, "budget_per_month": 12_500_000, "tags": ["eu", "trial"], "note": HOSTILE}
    assert shown | expected == shown
    assert (shown["sources"]["tokens_per_day"], shown["sources"]["weight"]) == ("tenant", "default")

    fields |= {"tokens_per_minute": "", "weight": "2", "budget_warn_at": "50 %, 90", "soft_budget_per_30_days": "7.50"}
    fields |= {"model_limits": "base: max_concurrent=2 budget_per_month=1.50\n*: tokens_per_day=60k"}
    preview = text(await browser.submit("/admin/tenants/acme/edit", **fields))
    check_inert(preview)
    check_preview(preview)
    assert (await gateway.admin.get("/admin/api/tenants/acme")).json["weight"] == 1
    again = text(await browser.submit("/admin/tenants/acme/edit", act="edit", **fields))
    assert 'value="50 %, 90"' in again
    assert "*: tokens_per_day=60k</textarea>" in again
    assert (await browser.submit("/admin/tenants/acme/edit", act="save", **fields)).status == 303
    [entry] = (await gateway.admin.get("/admin/api/audit?action=tenant.update")).json["data"]
    assert entry["detail"] == {
        "inherit": ["tokens_per_minute"],
        "weight": 2.0,
        "soft_budget_per_30_days": 7_500_000,
        "budget_warn_at": [0.5, 0.9],
        "model_limits": {"base": {"max_concurrent": 2, "budget_per_month": 1_500_000}, "*": {"tokens_per_day": 60_000}},
    }
    assert entry["before"]["weight"] == 1.0
    same = await browser.submit("/admin/tenants/acme/edit", **fields)
    assert same.headers["Location"] == "/admin/tenants/acme?done=same"
    await check_mistakes(browser, fields)
    for path in ("", "?tab=limits", "?tab=keys", "?tab=audit", "/edit"):
        check_inert(text(await browser.get(f"/admin/tenants/acme{path}")))
    limits = text(await browser.get("/admin/tenants/acme?tab=limits"))
    assert re.search(r"0\.00.*of.*12\.50", limits, re.DOTALL)
    check_inert(text(await browser.get("/admin/tenants?tag=eu")))
    for query, found in (("q=ac", True), ("q=zzz", False), ("suspended=true", False), ("plan=none", True)):
        assert ('href="/admin/tenants/acme"' in text(await browser.get(f"/admin/tenants?{query}"))) is found

    await check_the_end(gateway, browser)


async def test_every_wrong_field_is_named_at_once(gateway: Gateway, browser: Browser):
    """Fields that the page reads itself, those that the API checks, and a name: each was reported after the others."""
    await gateway.tenant("acme")
    wrong = {"tokens_per_minute": "many", "weight": "5000", "priority": "12", "tags": "<b>", "contact": "x" * 201}
    wrong |= {"max_adapter_bytes": "3 apples", "upload_bytes_per_minute": "0.3 B", "model_limits": "none: weight=1"}
    for name in ("Bad Name", "acme"):
        answer = await browser.submit("/admin/tenants/-/new", name=name, **wrong)
        page = answer.body.decode()
        assert (answer.status, set(re.findall(r'id="e-(\w+)"', page))) == (400, {"name", *wrong})
    assert "exists already" in page
    wrong["model_limits"] = "pirate: max_concurrent=2"
    page = (await browser.submit("/admin/tenants/acme/edit", **wrong)).body.decode()
    assert set(re.findall(r'id="e-(\w+)"', page)) == wrong.keys() - {"model_limits"}
    page = (await browser.submit("/admin/tenants/-/new", name="new", **wrong)).body.decode()
    assert set(re.findall(r'id="e-(\w+)"', page)) == wrong.keys()
    assert (await gateway.admin.get("/admin/api/tenants")).json["total"] == 1


async def test_bytes_have_units_and_choices_are_chosen(gateway: Gateway, browser: Browser):
    page = text(await browser.get("/admin/tenants/-/new"))
    assert "Empty: 64 GiB, the default." in page
    assert re.findall(r'<option value="(\w*)"[^>]*>([^<]*)', page.split('id="f-on_token_limit"')[1]) == [
        ("", "Refuse the request (the default)"),
        ("refuse", "Refuse the request"),
        ("shorten", "Shorten the answer"),
    ]
    given = {"max_adapter_bytes": "1.5 GiB", "upload_bytes_per_minute": "1000000", "on_token_limit": "shorten"}
    assert (await browser.submit("/admin/tenants/-/new", name="acme", **given)).status == 303
    shown = (await gateway.admin.get("/admin/api/tenants/acme")).json
    assert [shown[name] for name in given] == [3 << 29, 1_000_000, "shorten"]
    page = text(await browser.get("/admin/tenants/acme/edit"))
    assert [re.findall(rf'name="{name}" type="text" value="([^"]*)"', page) for name in list(given)[:2]] == [
        ["1,536 MiB"],
        ["1,000,000 B"],
    ]
    same = {"max_adapter_bytes": "1,536 MiB", "upload_bytes_per_minute": "1,000,000 B", "on_token_limit": "shorten"}
    saved = await browser.submit("/admin/tenants/acme/edit", **same)
    assert saved.headers["Location"] == "/admin/tenants/acme?done=same"


async def test_many_tenants_change_after_a_look(gateway: Gateway, browser: Browser):
    for name in ("acme", "globex"):
        await gateway.tenant(name, tags=["trial"])
    await gateway.tenant("other")
    await gateway.admin.call("PUT", "/admin/api/plans/pro", json={"weight": 3})
    asked = await browser.submit("/admin/tenants/-/bulk", tag="trial", act="plan", value="pro")
    page = text(asked)
    assert "2 tenants change" in page
    assert "globex" in page
    assert "other" not in re.sub(r"<title>.*?</title>", "", page)
    wrong = await browser.submit("/admin/tenants/-/bulk", tag="trial", act="plan", value="pro", typed="3")
    assert wrong.status == 400
    assert (await gateway.admin.get("/admin/api/tenants?plan=pro")).json["total"] == 0
    done = await browser.submit("/admin/tenants/-/bulk", tag="trial", act="plan", value="pro", typed="2")
    assert done.status == 303
    assert (await gateway.admin.get("/admin/api/tenants?plan=pro")).json["total"] == 2
    assert (await browser.submit("/admin/tenants/-/bulk", act="add_tags", value="<b>")).status == 400


async def test_a_key_is_shown_once(gateway: Gateway, browser: Browser):
    await gateway.tenant("acme")
    assert 'value="inference" checked' in text(await browser.get("/admin/tenants/acme/keys/new"))
    made = await browser.submit("/admin/tenants/acme/keys/new", label=HOSTILE, scopes="inference", expires="1")
    page = text(made)
    check_inert(page)
    key = re.findall(r"lpx_[0-9a-f]{16}_[0-9a-f]{48}", page)[0]
    assert made.headers["Cache-Control"] == "no-store"
    assert (await gateway.client(key).chat()).status == 200
    key_id = key.split("_")[1]
    for query in ("state=expiring", "tenant=acme", "q=alert", f"q={key_id[:6]}", "sort=-last_used_at", "sort=tenant"):
        page = text(await browser.get(f"/admin/keys?{query}"))
        assert key_id in page, query
        assert key.split("_")[2] not in page
        check_inert(page)

    wrong = await browser.submit(f"/admin/keys/{key_id}/edit", label=HOSTILE, requests_per_minute="some")
    assert (wrong.status, 'id="e-requests_per_minute"' in wrong.body.decode()) == (400, True)
    changed = {"label": HOSTILE, "requests_per_minute": "1k", "budget_per_30_days": "2.50"}
    assert (await browser.submit(f"/admin/keys/{key_id}/edit", **changed)).status == 303
    form = text(await browser.get(f"/admin/keys/{key_id}/edit"))
    assert 'value="1,000"' in form
    assert 'value="2.50"' in form
    check_inert(form)
    assert (await browser.submit(f"/admin/keys/{key_id}/edit", label=HOSTILE, requests_per_minute="2")).status == 303
    [row] = [
        row for row in (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"] if row["id"] == key_id
    ]
    assert (row["requests_per_minute"], row["budget_per_30_days"]) == (2, None)

    async def is_noted() -> bool:
        # The use is written within seconds.
        return key_id not in text(await browser.get("/admin/keys?state=never_used"))

    await until(is_noted)
    assert (await browser.submit("/admin/tenants/acme/keys/new", scopes="admin", expires="")).status == 400
    limited = {"scopes": "inference", "expires": "", "max_concurrent": "3", "label": "limited"}
    assert (await browser.submit("/admin/tenants/acme/keys/new", **limited)).status == 200
    keys = (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"]
    assert {row["label"]: row["max_concurrent"] for row in keys}["limited"] == 3
    rotated = text(await browser.submit(f"/admin/keys/{key_id}/rotate", grace="0"))
    new = re.findall(r"lpx_[0-9a-f]{16}_[0-9a-f]{48}", rotated)[0]
    assert (await gateway.client(key).chat()).status == 401
    assert (await gateway.client(new).chat()).status == 200
    new_id = new.split("_")[1]
    assert (await browser.submit(f"/admin/keys/{new_id}/revoke", typed="wrong")).status == 400
    assert (await browser.submit(f"/admin/keys/{new_id}/revoke", typed=HOSTILE)).status == 303
    assert (await gateway.client(new).chat()).status == 401
    assert (await browser.get("/admin/keys/0123456789abcdef/revoke")).status == 404
    made = text(await browser.submit("/admin/keys/new", label="ci", role="viewer", expires="7"))
    admin = gateway.client(re.findall(r"lpx_[0-9a-f]{16}_[0-9a-f]{48}", made)[0])
    assert (await admin.get("/admin/api/tenants")).status == 200
    assert (await admin.post("/admin/api/tenants", {"name": "x"})).status == 403


async def test_plans_and_prices_by_form(gateway: Gateway, browser: Browser):
    prices = {"all_input": "0.20", "all_output": "0.60", "adapters_input": "0.40", "adapters_output": "1.20"}
    made = await browser.submit("/admin/plans/-/new", name="pro", requests_per_minute="5", weight="2", **prices)
    assert made.status == 303, made.body
    plan = (await gateway.admin.get("/admin/api/plans/pro")).json
    assert (plan["requests_per_minute"], plan["prices"]["*"]) == (
        5, {"input": 200_000, "cached": 200_000, "output": 600_000},
    )  # fmt: skip
    taken = await browser.submit("/admin/plans/-/new", name="pro")
    assert 'id="e-name"' in taken.body.decode()
    await gateway.admin.call(
        "PUT", "/admin/api/plans/pro", json={"model_limits": {"base": {"max_concurrent": 3}}, "weight": 2}
    )
    form = text(await browser.get("/admin/plans/pro"))
    assert 'value="2"' in form
    assert "base: max_concurrent=3</textarea>" in form
    kept = {"weight": "4", "model_limits": "base: max_concurrent=3", "budget_warn_at": "none"}
    assert (await browser.submit("/admin/plans/pro", **kept)).status == 303
    plan = (await gateway.admin.get("/admin/api/plans/pro")).json
    assert (plan["weight"], plan["model_limits"], plan["prices"]) == (4, {"base": {"max_concurrent": 3}}, {})
    assert (plan["budget_warn_at"], plan["sources"]["budget_warn_at"]) == ([], "plan")
    wrong = await browser.submit("/admin/plans/pro", weight="0", all_input="1")
    assert (wrong.status, 'id="e-all_output"' in wrong.body.decode()) == (400, True)
    await gateway.tenant("acme", plan="pro")
    assert "cannot be deleted" in (await browser.submit("/admin/plans/pro/delete", typed="pro")).body.decode()
    assert "1</a>" in text(await browser.get("/admin/plans"))

    wrong = await browser.submit("/admin/prices", model="nobody/x", input="1", output="2")
    assert 'id="e-model"' in wrong.body.decode()
    wrong = await browser.submit("/admin/prices", model="*", input="cheap", output="2")
    assert 'id="e-input"' in wrong.body.decode()
    for model in ("*", "base", "acme/*"):
        assert (await browser.submit("/admin/prices", model=model, input="0.5", output="2")).status == 303
    listed = text(await browser.get("/admin/prices"))
    assert "/admin/prices/acme/%2A/delete" in listed
    assert (await browser.submit("/admin/prices/acme/*/delete", typed="acme/*")).status == 303
    assert len((await gateway.admin.get("/admin/api/prices")).json["data"]) == 2


async def test_the_audit_shows_before_and_after(gateway: Gateway, browser: Browser):
    await gateway.tenant("acme", note=HOSTILE)
    await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"budget_per_month": 50_000_000})
    await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"budget_per_month": 75_500_000})
    page = text(await browser.get("/admin/audit?action=tenant"))
    check_inert(page)
    assert "<b>Budget per calendar month (UTC):</b> 50.00 → 75.50" in re.sub(r"\s+", " ", page)
    assert "key.create" not in text(await browser.get("/admin/audit?not_action=key,login"))
    file = text(await browser.get("/admin/audit?format=csv"))
    rows = list(csv.DictReader(file.splitlines()))
    assert {row["action"] for row in rows} >= {"tenant.create", "tenant.update", "key.create"}
    assert any("50.00 -> 75.50" in row["changes"] for row in rows)
    assert (await browser.get("/admin/audit?since=yesterday")).status == 400
    page = text(await browser.get("/admin/tenants/acme?tab=audit"))
    assert "Tenant changed" in page
    assert "tenant.update" in page
    prices = {"*": {"input": 200_000, "output": 600_000}}
    plan = {"max_adapter_bytes": 3 << 30, "model_limits": {"base": {"max_concurrent": 2}}, "prices": prices}
    for terms in ({"weight": 2}, plan):
        assert (await gateway.admin.call("PUT", "/admin/api/plans/pro", json=terms)).status == 200
    await gateway.admin.post("/admin/api/tenants/acme/keys", {"requests_per_day": 1000})
    page = " ".join(re.sub("<[^>]*>", "", text(await browser.get("/admin/audit"))).split())
    assert "Prices: none → *: Input: 0.20, Cached input: 0.20, Output: 0.60" in page
    assert "Total bytes of adapter tensors, including all versions on record: none → 3 GiB" in page
    assert "Limits of single models: none → base: Concurrent requests: 2" in page
    assert "Limits: Requests per day: 1,000" in page
    assert "Weight: 2 → none" in page
    # No JSON is left.
    assert not re.search(r"[{}\[\]]", page.split("Before")[1])


async def test_each_role_sees_and_does_its_own(gateway: Gateway):
    await gateway.tenant("acme")
    await gateway.admin.call("PUT", "/admin/api/plans/pro", json={})
    pages = ("tenants", "tenants/acme", "tenants/acme?tab=limits", "keys", "plans", "prices", "audit")
    async with gateway.browser(await role(gateway, "viewer")) as viewer:
        for page in pages:
            shown = text(await viewer.get(f"/admin/{page}"))
            main = shown.split("<main")[1]
            assert 'method="post"' not in main, page
            assert not re.search(r"/(edit|delete|suspend|rotate|revoke|new|budget)\"", main), page
        acts = ("tenants/acme/suspend", "tenants/-/new", "tenants/-/bulk", "tenants/acme/budget")
        for path in (*acts, "tenants/acme/keys/new", "keys/new", "prices", "plans/pro/prices"):
            assert (await viewer.submit(f"/admin/{path}", typed="acme", name="x", act="suspend")).status == 403, path
    async with gateway.browser(await role(gateway, "billing")) as billing:
        budgets = {"budget_per_month": "9.99", "soft_budget_per_day": "1", "budget_warn_at": "90 %", "weight": "9"}
        assert "Weight" not in text(await billing.submit("/admin/tenants/acme/budget", **budgets))
        assert (await billing.submit("/admin/tenants/acme/budget", act="save", **budgets)).status == 303
        wrong = await billing.submit("/admin/tenants/acme/budget", budget_per_month="x")
        assert 'id="e-budget_per_month"' in wrong.body.decode()
        assert (await billing.submit("/admin/prices", model="*", input="1", output="2")).status == 303
        assert (await billing.submit("/admin/plans/pro/prices", all_input="1", all_output="2")).status == 303
        assert (await billing.submit("/admin/tenants/acme/edit", weight="9")).status == 403
        assert (await billing.submit("/admin/plans/pro", weight="9")).status == 403
    shown = (await gateway.admin.get("/admin/api/tenants/acme")).json
    assert (shown["budget_per_month"], shown["soft_budget_per_day"], shown["weight"]) == (9_990_000, 1_000_000, 1.0)
    assert shown["budget_warn_at"] == [0.9]
    assert (await gateway.admin.get("/admin/api/plans/pro")).json["prices"]["*"]["output"] == 2_000_000


async def test_a_form_needs_the_sessions_value_and_a_tenant_reaches_no_page(gateway: Gateway, browser: Browser):
    acme = await gateway.tenant("acme")
    forged = await browser.call("POST", "/admin/tenants/acme/suspend", data={"typed": "acme"})
    assert (forged.status, forged.error["code"]) == (403, "csrf_mismatch")
    async with gateway.browser(acme.key, "/console") as tenant:
        for page in ("tenants", "tenants/acme", "keys", "plans", "prices", "audit"):
            answer = await tenant.get(f"/admin/{page}")
            assert (answer.status, answer.headers["Location"].split("?")[0]) == (303, "/admin/login"), page
