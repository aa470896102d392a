"""Back and Reload after forms in a real browser: Back shows the page before, Reload repeats nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from testing.browser import Person, expect, person
from testing.gateway.running import ADMIN_KEY, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

EDIT = "/admin/tenants/acme/edit"


async def fill_and_send(who: Person, **fields: str) -> None:
    for name, value in fields.items():
        await who.page.fill(f"main [name={name}]", value)
    await who.page.click("main form .button.primary")


async def back(who: Person) -> str:
    """Go back and return the heading of the page. Raises an error of Playwright for a page that cannot be shown."""
    await who.page.go_back()
    return await who.page.inner_text("main h1")


async def reload(who: Person) -> str:
    await who.page.reload()
    return await who.page.inner_text("main h1")


async def heading(who: Person, text: str) -> None:
    """Wait until the page that a click opens has the heading."""
    await expect(who.page.locator("main h1")).to_have_text(text)


@asynccontextmanager
async def operator_at(gateway: Gateway, browser: Any, path: str) -> AsyncIterator[Person]:
    """Yield an operator's page at a path, after a log-in. There is a tenant acme."""
    await gateway.tenant("acme")
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open(path)
        yield operator


async def test_back_after_a_saved_edit_shows_its_review_then_the_form(gateway: Gateway, browser):
    async with operator_at(gateway, browser, EDIT) as operator:
        await fill_and_send(operator, requests_per_minute="many")
        await expect(operator.page.locator("#e-requests_per_minute")).not_to_be_empty()
        await fill_and_send(operator, requests_per_minute="70")
        await heading(operator, "Changes of acme")
        assert await reload(operator) == "Changes of acme"
        await operator.page.click("main .button.primary")
        await operator.page.wait_for_url("**/admin/tenants/acme?done=changed")
        assert await back(operator) == "Changes of acme"
        assert await back(operator) == "Edit acme"
        assert await operator.page.input_value("[name=requests_per_minute]") == "many"
        assert await back(operator) == "Edit acme"


async def test_a_new_key_is_shown_once_and_made_once(gateway: Gateway, browser):
    async with operator_at(gateway, browser, "/admin/tenants/acme/keys/new") as operator:
        await fill_and_send(operator, label="phone")
        secret = await operator.page.inner_text("main .copyable code")
        assert secret.startswith("lpx_")
        assert secret not in operator.page.url
        assert all(secret not in str(cookie) for cookie in await operator.context.cookies())
        assert await reload(operator) == "No longer kept"
        assert secret not in await operator.page.content()
        assert await back(operator) == "New key of acme"
        await operator.open("/admin/tenants/acme?tab=keys")
        assert await operator.page.locator("tbody tr", has_text="phone").count() == 1
        assert await back(operator) == "New key of acme"


async def test_back_passes_a_refused_log_in(gateway: Gateway, browser):
    async with person(browser, gateway.url) as operator:
        await operator.open("/admin/login?next=/admin/keys")
        await operator.page.fill("[name=key]", "wrong")
        await operator.page.click("main button")
        await operator.sees("not valid", "main [role=alert]")
        assert await reload(operator) == "Operator log-in"
        await operator.page.fill("[name=key]", ADMIN_KEY)
        await operator.page.click("main button")
        await operator.page.wait_for_url(f"{operator.url}/admin/keys")
        assert await back(operator) == "Operator log-in"


async def test_an_act_that_failed_can_be_left_by_back(gateway: Gateway, browser):
    """The page of the problem has its own URL, and Reload does not repeat the act."""
    async with operator_at(gateway, browser, "/admin/plans/-/new") as operator:
        await fill_and_send(operator, name="gold")
        await operator.page.wait_for_url("**/admin/plans?done=saved")
        await operator.open("/admin/plans/-/new")
        await fill_and_send(operator, name="gold")
        await operator.sees("exists", "main")
        assert await reload(operator) == "New plan"
        assert await back(operator) == "New plan"
