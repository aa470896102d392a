"""Drafts of long forms in a real browser: kept over the end of a session, for the same person, and never secrets."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.async_api import TimeoutError

from testing.browser import Person, faults, person
from testing.gateway.running import ADMIN_KEY, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

EDIT, PLAYGROUND = "/admin/tenants/acme/edit", "/admin/playground?tenant=acme"
LIMIT, NOTE = "[name=requests_per_minute]", "main .banner:has-text('your draft')"
STORED = "JSON.stringify(Object.entries(sessionStorage).filter(([name]) => name.startsWith('draft ')))"


async def stored(who: Person) -> str:
    found: str = await who.page.evaluate(STORED)
    return found


async def end_sessions(gateway: Gateway) -> None:
    for session in (await gateway.admin.get("/admin/api/sessions")).json["data"]:
        await gateway.admin.call("DELETE", f"/admin/api/sessions/{session['id']}")


async def log_in_here(who: Person, key: str) -> None:
    """Log in on the page that is shown."""
    await who.page.fill("input[name=key]", key)
    await who.page.click("main button")
    try:
        await who.page.wait_for_selector("[data-person]")
    except TimeoutError as error:
        raise AssertionError(f"the log-in led to {who.page.url}: {await who.text()}") from error
    await who.page.wait_for_load_state()  # the script fills in the draft


async def type_and_lose_the_session(gateway: Gateway, who: Person) -> None:
    await who.log_in("/admin", ADMIN_KEY)
    await who.open(EDIT)
    await who.page.fill(LIMIT, "70")
    await who.page.fill("[name=note]", '<b>"mine"')
    await end_sessions(gateway)
    await who.page.click("main .button.primary")
    await who.page.wait_for_url("**/admin/login?next=**")


async def test_a_draft_is_there_after_the_log_in_and_ends_when_it_is_saved(gateway: Gateway, browser: Any):
    await gateway.tenant("acme")
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await type_and_lose_the_session(gateway, operator)
        await log_in_here(operator, ADMIN_KEY)
        assert page.url.endswith(EDIT)
        assert await page.input_value(LIMIT) == "70"
        assert await page.input_value("[name=note]") == '<b>"mine"'
        assert await page.locator(NOTE).count() == 1
        operator.problems.clear()
        assert await faults(operator) == []
        await page.click("main .button.primary")
        await page.wait_for_selector("h1:text-is('Changes of acme')")
        # The draft is still kept while the changes are reviewed.
        assert "70" in await stored(operator)
        await page.click("main .button.primary")
        await page.wait_for_url("**/admin/tenants/acme?done=changed")
        assert await stored(operator) == "[]"
        await operator.open(EDIT)
        assert await page.locator(NOTE).count() == 0


async def test_a_conflict_is_solved_by_sending_the_form_again(gateway: Gateway, browser: Any):
    await gateway.tenant("acme", requests_per_minute=60)
    tenant = "/admin/api/tenants/acme"
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open(EDIT)
        # Typed and removed again: the answer has the value that another person saved.
        for name in ("Odd", ""):
            await page.fill("[name=display_name]", name)
        await page.fill(LIMIT, "70")
        await gateway.admin.call("PATCH", tenant, json={"requests_per_minute": 65, "display_name": "Acme"})
        await page.click("main .button.primary")
        await page.wait_for_selector("#e-requests_per_minute:has-text('the present value is 65')")
        await page.wait_for_load_state()
        operator.problems.clear()
        assert await page.locator(NOTE).count() == 0
        # A value that is typed on the answer is a draft like any other.
        await page.fill("[name=note]", "mine")
        await page.reload()
        assert (await page.input_value("[name=note]"), await page.input_value(LIMIT)) == ("mine", "70")
        await page.click("main .button.primary")
        await page.wait_for_selector("h1:text-is('Changes of acme')")
        await page.click("main .button.primary")
        await page.wait_for_url("**/admin/tenants/acme?done=changed")
        now = (await gateway.admin.get(tenant)).json
        assert (now["requests_per_minute"], now["display_name"], now["note"]) == (70, "Acme", "mine")


async def test_another_person_in_the_same_tab_gets_no_draft(gateway: Gateway, browser: Any):
    await gateway.tenant("acme")
    other = (await gateway.admin.post("/admin/api/keys", {"role": "operator", "label": "Bea"})).json["key"]
    async with person(browser, gateway.url) as operator:
        await type_and_lose_the_session(gateway, operator)
        await log_in_here(operator, other)
        assert operator.page.url.endswith(EDIT)
        assert await operator.page.input_value(LIMIT) == ""
        assert await stored(operator) == "[]"


async def test_the_log_in_page_removes_drafts_of_an_hour_ago(gateway: Gateway, browser: Any):
    await gateway.tenant("acme")
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await type_and_lose_the_session(gateway, operator)
        for minutes, is_kept in ((58, True), (62, False)):
            await page.clock.set_fixed_time(datetime.now(UTC) + timedelta(minutes=minutes))
            await page.reload()
            assert await page.locator("input[name=key]").count() == 1
            assert ("70" in await stored(operator)) is is_kept, minutes


async def test_a_draft_ends_by_cancel_discard_and_log_out(gateway: Gateway, browser: Any):
    await gateway.tenant("acme")
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await operator.log_in("/admin", ADMIN_KEY)
        for end in ("main a.button:text-is('Cancel')", "Discard", ".account-box button"):
            await operator.open(EDIT)
            assert await page.input_value(LIMIT) == ""
            await page.fill(LIMIT, "70")
            assert "70" in await stored(operator)
            if end == "Discard":
                await page.reload()
                await page.click("text=Discard the draft")
                assert await page.input_value(LIMIT) == ""
            elif end.startswith(".account"):
                await page.click(".account summary")
                await page.click(end)
                await page.wait_for_url("**/admin/login")
            else:
                await page.click(end)
                await page.wait_for_url("**/admin/tenants/acme")
            assert await stored(operator) == "[]", end


async def test_what_is_typed_before_the_script_runs_is_newer_than_the_draft(gateway: Gateway, browser: Any):
    await gateway.tenant("acme")
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open(EDIT)
        await page.fill(LIMIT, "70")
        await page.fill("[name=note]", "mine")
        may_load = await operator.delay("**/drafts.js*")
        await page.goto(operator.url + EDIT, wait_until="commit")
        await page.fill(LIMIT, "80")
        may_load.set()
        await page.wait_for_load_state()
        assert (await page.input_value(LIMIT), await page.input_value("[name=note]")) == ("80", "mine")
        assert await page.locator(NOTE).count() == 1
        assert "80" in await stored(operator)


async def test_forms_of_keys_keep_nothing(gateway: Gateway, browser: Any):
    await gateway.tenant("acme")
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        for path, field in (("/admin/tenants/acme/keys/new", "label"), ("/admin/alerts/-/new", "url")):
            await operator.open(path)
            await operator.page.fill(f"main [name={field}]", "https://hooks.example.com/secret")
            assert await stored(operator) == "[]", path


async def test_a_prompt_and_an_uploads_name_are_kept(gateway: Gateway, upstream: Any, browser: Any):
    acme = await gateway.tenant("acme")
    assert acme.key
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/tenants/acme/adapter-upload")
        await page.fill("[name=name]", "pirate")
        await operator.open(f"{PLAYGROUND}&a=base")
        await page.fill("[name=prompt]", "Why is the sky blue?")
        await page.fill("[name=model_a]", "other")
        await end_sessions(gateway)
        await operator.open(f"{PLAYGROUND}&a=base")
        await log_in_here(operator, ADMIN_KEY)
        assert await page.input_value("[name=prompt]") == "Why is the sky blue?"
        assert await page.input_value("[name=model_a]") == "base"
        assert "sky" in (await page.text_content("#curl") or "")
        await page.fill("#f-max_tokens", "8")
        await page.click("#run")
        await page.wait_for_selector("#side-a [data-part=state]:has-text('complete')")
        assert "sky" not in await stored(operator)
        await operator.open("/admin/tenants/acme/adapter-upload")
        assert await page.input_value("[name=name]") == "pirate"
