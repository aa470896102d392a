"""The pages by keyboard alone: skip link, search, menus, and a focus that live updates leave where it is."""

from typing import Any

import pytest

from testing.browser import Person, expect, person
from testing.gateway.running import ADMIN_KEY, Gateway
from testing.gateway.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def check_menu(who: Person, button: str, opened: str) -> None:
    """Open a menu by its button and close it by Escape, which returns the focus. opened: selector of the open menu."""
    await who.page.focus(button)
    await who.page.keyboard.press("Enter")
    menu = who.page.locator(opened)
    await expect(menu).to_have_count(1)
    # The focus moves on into the menu.
    await who.page.keyboard.press("Tab")
    await expect(who.page.locator(button)).not_to_be_focused()
    await who.page.keyboard.press("Escape")
    await expect(menu).to_have_count(0)
    await expect(who.page.locator(button)).to_be_focused()


async def test_a_person_with_a_keyboard_reaches_content_search_and_menus(gateway: Gateway, browser: Any):
    async with person(browser, gateway.url) as who:
        page = who.page
        await who.log_in("/admin", ADMIN_KEY)
        await who.open("/admin/engines")
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()
        await expect(page.locator(".skip")).to_be_in_viewport()
        await page.keyboard.press("Enter")
        await expect(page.locator("#main")).to_be_focused()
        search = page.locator("[data-search]")
        await page.keyboard.press("/")
        await expect(search).to_be_focused()
        await expect(search).to_have_value("")
        # In a field it is a character.
        await page.keyboard.press("/")
        await expect(search).to_have_value("/")
        await check_menu(who, ".account > summary", ".account[open]")
        await check_menu(who, ".strip > summary", ".strip[open]")
        await page.set_viewport_size({"width": 390, "height": 900})
        await check_menu(who, ".menu-button", ".menu-button[aria-expanded=true]")
        assert who.problems == []


async def test_the_focus_survives_live_updates(gateway: Gateway, upstream: Upstream, browser: Any):
    async with person(browser, gateway.url) as who:
        page = who.page
        await who.log_in("/admin", ADMIN_KEY)
        await who.open("/admin/engines")
        strip = page.locator("#strip summary")
        await strip.focus()
        assert (await gateway.admin.post("/admin/api/engines/drain", {"url": upstream.url})).status == 200
        await expect(strip).to_contain_text("0/1 engines up")
        await expect(strip).to_be_focused()
        table = page.locator("#engines-live")
        await expect(table).to_contain_text("drained")
        link = table.locator("th a").last
        await link.focus()
        assert (await gateway.admin.post("/admin/api/engines/resume", {"url": upstream.url})).status == 200
        await expect(strip).to_contain_text("1/1 engines up")
        # The page has handled the first answer once it asks again.
        for _ in range(2):
            async with page.expect_response(lambda answer: "x-live" in answer.request.headers):
                pass
        await expect(link).to_be_focused()
        await link.blur()
        await expect(table).not_to_contain_text("drained")
        assert who.problems == []
