"""Pages at work in a real browser: an edit, a drain, the live strip, the table of engines, colours."""

import re
from itertools import pairwise

import pytest

from testing.browser import expect, faults, person
from testing.gateway.running import ADMIN_KEY, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_edit_is_shown_before_it_is_saved(gateway, browser):
    await gateway.tenant("acme")
    async with person(browser, gateway.url, width=390, scheme="dark") as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/tenants/acme/edit")
        await operator.page.fill("#f-weight", "3")
        await operator.page.fill("#f-model_limits", "base: max_concurrent=2\n*: budget_per_30_days=1.50")
        await operator.page.click("button:has-text('Review the changes')")
        await operator.page.wait_for_selector("button:has-text('Save')")
        await operator.sees("1 (inherited)")
        await operator.page.wait_for_load_state()
        assert not await faults(operator)
        await operator.page.click("button:has-text('Back to the form')")
        await expect(operator.page.locator("#f-weight")).to_have_value("3")
        await operator.page.click("button:has-text('Review the changes')")
        await operator.page.click("button:has-text('Save')")
        await operator.page.wait_for_url("**/admin/tenants/acme?done=changed")
    shown = (await gateway.admin.get("/admin/api/tenants/acme")).json
    assert (shown["weight"], shown["model_limits"]["*"]) == (3, {"budget_per_30_days": 1_500_000})


async def test_an_operator_drains_and_resumes_an_engine(gateway, upstream, browser):
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/engines")
        await operator.page.click("a.button:has-text('Drain')")
        button = operator.page.locator("button.danger")
        await expect(button).to_be_disabled()
        await operator.page.fill("input[name=typed]", upstream.url)
        await button.click()
        await operator.page.wait_for_url("**/admin/engines")
        await operator.page.wait_for_selector("#engines td .state-warn")
        # The strip follows by itself.
        await operator.page.wait_for_selector("#strip .strip-bad")
        await operator.page.click("button:has-text('Resume')")
        await operator.page.wait_for_selector("#engines td .state-good")
        await operator.page.wait_for_selector("#strip .strip-good")
        assert not operator.problems
    audit = (await gateway.admin.get("/admin/api/audit")).json["data"]
    assert [entry["action"] for entry in audit[:2]] == ["engine.resume", "engine.drain"]


async def test_a_click_on_the_strip_counts_although_it_changes_meanwhile(gateway, upstream, browser):
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await operator.log_in("/admin", ADMIN_KEY)
        await page.hover("#strip summary")
        await page.mouse.down()
        assert (await gateway.admin.post("/admin/api/engines/drain", {"url": upstream.url})).status == 200
        # The strip is sent within a second of the change.
        await page.wait_for_timeout(2500)
        await page.mouse.up()
        await expect(page.locator("#strip details")).to_have_attribute("open", "")
        await expect(page.locator("#strip summary")).to_contain_text("0/1 engines up")
        await expect(page.locator("#strip details")).to_have_attribute("open", "")


async def test_the_engines_fit_a_page_of_1280_px(gateway, upstream, browser):
    """The drain's button was behind a scroll bar once the engine reported its memory."""
    upstream.reported = {
        "kv_blocks_total": 2048,
        "kv_blocks_free": 3,
        "adapter_pages_total": 999,
        "adapter_pages_free": 1,
    }
    upstream.reported |= {"adapter_loads": 123_456, "adapter_evictions": 123_456, "prefix_query_tokens": 10**9}
    upstream.reported |= {"prefix_hit_tokens": 999_999_999, "preemptions": 12}
    upstream.version, upstream.seats, upstream.running = "0.9.0.dev12+g1234567", 1024, 1023

    async def is_known() -> bool:
        history = (await gateway.admin.get(f"/admin/api/engines/history?url={upstream.url}")).json
        return bool(history["samples"]) and history["samples"][-1]["kv_used"] is not None

    await until(is_known)
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/engines")
        await operator.page.wait_for_selector("#engines-box svg")
        widths = "(box => [box.scrollWidth, box.clientWidth])(document.querySelector('#engines-box'))"
        needed, has = await operator.page.evaluate(widths)
        assert needed <= has
        assert not await faults(operator)


async def test_the_colours_are_kept(gateway, browser):
    async with person(browser, gateway.url, scheme="light") as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        for theme in ("light", "dark"):
            await operator.page.click("[data-theme-switch]")
            await operator.page.reload()
            assert await operator.page.get_attribute("html", "data-theme") == theme
        assert await operator.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"


async def test_groups_of_fields_look_alike_in_every_form(gateway, browser):
    """A heading without a frame, also where no style names the form."""
    await gateway.tenant("acme")
    frames = "[...document.querySelectorAll('main fieldset')].map(each => getComputedStyle(each).borderTopWidth)"
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        for path in ("/admin/tenants/acme/keys/new", "/admin/engines/bases/new", "/admin/alerts/-/new"):
            await operator.open(path)
            assert set(await operator.page.evaluate(frames)) == {"0px"}, path


async def test_the_longest_environment_leaves_room_for_the_strip(serve, browser):
    name = "production-of-the-region-europe-"
    async with serve(environment=name) as gateway:
        for width in (390, 1280):
            async with person(browser, gateway.url, width=width) as operator:
                await operator.log_in("/admin", ADMIN_KEY)
                await operator.open("/admin/engines")
                page = operator.page
                await expect(page).to_have_title(re.compile(name))
                await expect(page.locator("header .environment")).to_contain_text(name)
                assert not await faults(operator)
                assert await page.evaluate("document.documentElement.scrollWidth") <= width
                boxes = [await page.locator(each).bounding_box() for each in (".environment", "#strip summary", ".who")]
                for left, right in pairwise(box for box in boxes if box is not None):
                    assert left["x"] + left["width"] <= right["x"], (width, boxes)
                assert (boxes[-1]["x"] + boxes[-1]["width"] <= width, len(boxes)) == (True, 3)
