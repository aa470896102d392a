"""Four questions of an operator, each answered by clicks from the overview, without an address from the keyboard."""

from datetime import UTC, datetime

import pytest

from testing.browser import expect, person
from testing.gateway.running import ADMIN_KEY, until
from tests.gateway.api.adapters.test_adapters import files, push

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def prepared(gateway, upstream) -> str:
    """Make acme the dearest tenant, with refusals and two versions of an adapter on an engine.

    Returns the time of the refusals as HH:MM.
    """
    await gateway.admin.call("PUT", "/admin/api/prices/base", json={"input": 1_000_000, "output": 1_000_000})
    acme, globex = await gateway.tenant("acme", requests_per_minute=3), await gateway.tenant("globex")
    digests = [(await push(acme, "pirate", files(seed))).json["digest"] for seed in (1, 2)]
    upstream.resident = [digests[1]]
    assert (await globex.complete(max_tokens=1)).status == 200
    at = datetime.now(UTC)
    assert [(await acme.complete()).status for _ in range(5)] == [200, 200, 200, 429, 429]

    async def is_known() -> bool:
        refusals = (await gateway.admin.get("/admin/api/requests?limit_name=requests_per_minute")).json["data"]
        usage = (await gateway.admin.get("/admin/api/usage?group_by=tenant")).json["data"]
        places = (await gateway.admin.get("/admin/api/residency")).json["data"]
        return len(refusals) == 2 and sum(row["requests"] for row in usage) == 4 and bool(places)

    await until(is_known)
    return f"{at:%H:%M}"


async def test_the_four_questions_are_answered_by_clicks(gateway, upstream, browser):
    at = await prepared(gateway, upstream)
    async with person(browser, gateway.url) as operator:
        page = operator.page
        await operator.log_in("/admin", ADMIN_KEY)

        # The tenant that cost most this week.
        await page.click(".tile:has-text('Cost')")
        await page.click(".segments a:text-is('7 d')")
        await page.wait_for_selector(".segments a[aria-current=true]:text-is('7 d')")
        await expect(page.locator("#usage tbody th").first).to_have_text("acme", use_inner_text=True)

        # The reason for acme's 429s at a time such as 10:40.
        await page.click(".brand")
        await page.click(".attention li:has-text('requests per minute') a, nav a:has-text('Why 429')")
        await page.fill("#f-tenant", "acme")
        await page.fill("#f-at", at)
        await page.click("button:text-is('Apply')")
        await page.wait_for_url("**/admin/refusals?*at=*")
        refused = "acme: 2 requests were refused by the limit requests per minute of the tenant"
        await expect(page.locator(".findings li").first).to_contain_text(refused, use_inner_text=True)

        # The engine on which the adapter pirate is resident.
        await page.click(".brand")
        await page.click("nav a:has-text('Engines')")
        await page.click("a:has-text('Residency of adapters')")
        await page.fill("#f-q", "pirate")
        await page.click("button:text-is('Apply')")
        await page.wait_for_selector(".matrix tr:has-text('acme/pirate@2') .cell-device")
        host = upstream.url.split("//")[1]
        assert host in await page.inner_text(".matrix thead")

        # Roll acme's adapter back; its row links to its page.
        await page.click(".matrix a:text-is('acme/pirate@2')")
        await page.click("tr:has-text(':latest') a:text-is('Roll back')")
        await page.click("main form button:has-text('Roll back')")
        await page.wait_for_selector(".banner.good:has-text('rolled back')")
        await operator.sees("Requests for this name use version 1.")
        assert operator.problems == []
    aliases = (await gateway.admin.get("/admin/api/tenants/acme/adapters/pirate/aliases")).json["data"]
    assert [alias["targets"][0]["version"] for alias in aliases if alias["alias"] == "latest"] == [1]
