"""Charts in a real browser: the steps of an engine, by second, in the colours of the scheme and the page's font."""

import time
from typing import Any

import pytest

from testing.browser import expect, faults, person
from testing.gateway.running import ADMIN_KEY, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

STOP = "document.querySelectorAll('[data-live]').forEach(each => delete each.dataset.live)"
# Lets no frame come, as in a page of another tab, and no live update, which draws a chart too.
HOLD_FRAMES = """
window.heldFrames = [];
window.requestAnimationFrame = act => window.heldFrames.push(act);
window.fetch = () => new Promise(() => {});
"""
RUN_FRAME = "window.heldFrames.splice(0).forEach(act => act(performance.now()))"
HOLD_TIMERS = (
    "const start = setTimeout; window.setTimeout = (act, ms, ...all) => ms >= 500 ? 0 : start(act, ms, ...all);"
)
DRAWN = "document.querySelector('#step-times canvas').toDataURL()"


async def report_steps(gateway, upstream) -> None:
    """Let the engine report the steps of five seconds, and wait until the gateway knows them."""
    now = int(time.time())
    upstream.recent_steps = [
        {"at": now - i, "steps": 9, "seconds": 0.5, "longest": 0.2, "prompt_tokens": 90, "decodes": 30, "roofline": 0.3}
        for i in range(5, 0, -1)
    ]

    async def is_known() -> bool:
        history = (await gateway.admin.get(f"/admin/api/engines/history?url={upstream.url}")).json
        return sum(each["steps"] for each in history["steps"]) == 45

    await until(is_known)


async def drawn_again(page: Any, before: str) -> str:
    """Wait until the chart is not drawn as before, and return the new drawing."""

    async def is_new() -> bool:
        return await page.evaluate(DRAWN) != before

    await until(is_new)
    return await page.evaluate(DRAWN)


async def test_an_engines_steps_are_drawn_and_repainted_with_the_scheme(gateway, upstream, browser):
    await report_steps(gateway, upstream)
    async with person(browser, gateway.url, scheme="light") as operator:
        page = operator.page
        await operator.log_in("/admin", ADMIN_KEY)
        # 5 x 0.3 s of the last minute.
        assert "2.5 %" in await page.inner_text("#tiles .tile:has-text('Engine load')")
        await operator.open(f"/admin/engines/one?url={upstream.url}")
        assert "2.5 %" in await page.inner_text(".tile:has-text('Engine load')")
        # Live charts follow the clock, so the page is stopped.
        await page.wait_for_selector("#step-times canvas")
        await page.evaluate(STOP)
        await page.click("#step-times summary")
        # The table is written in the event that follows the click.
        await expect(page.locator("#step-times tbody tr", has_text="55.6")).to_have_count(5)
        light = await page.evaluate(DRAWN)
        await page.emulate_media(color_scheme="dark")
        dark = await drawn_again(page, light)
        # The button's first step is light, whatever the system has.
        await page.click("[data-theme-switch]")
        assert await page.evaluate(DRAWN) == light
        await page.click("[data-theme-switch]")
        assert await page.evaluate(DRAWN) == dark
        assert await faults(operator) == []


async def test_a_chart_is_drawn_again_with_a_font_that_comes_late(gateway, upstream, browser):
    await report_steps(gateway, upstream)
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await operator.log_in("/admin", ADMIN_KEY)
        may_load = await operator.delay("**/*.woff2*")
        # The event "load" waits for the font.
        await page.goto(f"{gateway.url}/admin/engines/one?url={upstream.url}", wait_until="domcontentloaded")
        await page.wait_for_selector("#step-times canvas")
        await page.evaluate(STOP)
        before = await page.evaluate(DRAWN)
        may_load.set()
        await drawn_again(page, before)


async def test_the_first_frame_has_the_legends_and_does_not_wait_for_the_curves(gateway, upstream, browser):
    await report_steps(gateway, upstream)
    async with person(browser, gateway.url) as operator:
        page, canvas = operator.page, operator.page.locator("#step-times canvas")
        await operator.log_in("/admin", ADMIN_KEY)
        await page.add_init_script(HOLD_FRAMES + HOLD_TIMERS)
        await operator.open(f"/admin/engines/one?url={upstream.url}")
        assert await page.inner_text("#step-times .legend")
        assert await canvas.count() == 0
        await page.evaluate(RUN_FRAME)
        assert await canvas.count() == 0
        await page.evaluate(RUN_FRAME)
        await expect(canvas).to_have_count(1)


async def test_charts_of_a_page_in_another_tab_are_drawn_without_frames(gateway, upstream, browser):
    await report_steps(gateway, upstream)
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.page.add_init_script(HOLD_FRAMES)
        await operator.open(f"/admin/engines/one?url={upstream.url}")
        await expect(operator.page.locator("#step-times canvas")).to_have_count(1)
