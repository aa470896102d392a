"""Requests, refusals and usage in a real browser: from a refused request to its reason, live rows, hostile names."""

import pytest

from testing.browser import expect, faults, person
from testing.gateway.running import ADMIN_KEY, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = "<img src=x onerror=alert(1)>"


async def test_an_operator_finds_out_why_a_tenant_got_429s(gateway, browser):
    acme = await gateway.tenant("acme", requests_per_minute=2)
    statuses = [(await acme.complete(user=HOSTILE)).status for _ in range(5)]
    assert statuses.count(429) == 3

    async def is_recorded() -> bool:
        refused = await gateway.admin.get("/admin/api/requests?limit_name=requests_per_minute")
        every = await gateway.admin.get("/admin/api/requests?tenant=acme")
        return (len(refused.json["data"]), len(every.json["data"])) == (3, 5)

    await until(is_recorded)
    async with person(browser, gateway.url) as operator:
        page = operator.page
        page.on("dialog", lambda dialog: operator.problems.append(f"dialog: {dialog.message}"))
        await operator.log_in("/admin", ADMIN_KEY)
        await page.fill("[data-search]", "acme")
        await page.press("[data-search]", "Enter")
        await page.wait_for_url("**/admin/tenants/acme")
        await page.click("nav a:has-text('Why 429')")
        await operator.sees("3 requests were refused by the limit requests per minute of the tenant")
        await page.click("a:has-text('See the requests')")
        await expect(page.locator("#requests tbody tr")).to_have_count(3)
        await page.locator("#requests tbody th a").first.click()
        await page.wait_for_selector(".waterfall")
        await operator.sees("The limit requests per minute of the tenant is 2.")
        await operator.sees(HOSTILE)
        await page.click("a:has-text('Requests of this tenant within a minute')")
        await expect(page.locator("#requests tbody tr")).to_have_count(5)
        await page.wait_for_load_state()
        assert await faults(operator) == []


async def test_new_requests_appear_in_the_live_list(gateway, browser):
    acme = await gateway.tenant("acme")
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/requests")
        await operator.page.click("a:has-text('Live')")
        await operator.page.wait_for_selector("[data-live]")
        assert (await acme.complete()).status == 200
        await operator.page.wait_for_selector("#requests tbody tr")
        assert not operator.problems


async def test_a_viewer_and_billing_read_and_export(gateway, browser):
    acme = await gateway.tenant("acme")
    assert (await acme.complete()).status == 200
    for role in ("viewer", "billing"):
        made = await gateway.admin.post("/admin/api/keys", {"label": role, "role": role})
        async with person(browser, gateway.url, width=390) as visitor:
            await visitor.log_in("/admin", made.json["key"])
            for path in ("/admin/requests", "/admin/refusals", "/admin/usage"):
                await visitor.open(path)
                assert await faults(visitor) == []
            async with visitor.page.expect_download() as download:
                await visitor.page.click("button:has-text('Download')")
            assert (await download.value).suggested_filename == "usage-tenant.csv"
