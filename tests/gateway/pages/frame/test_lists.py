"""Lists with a wrong filter, or at a page after their end."""

from collections.abc import AsyncIterator

import pytest

from testing.gateway.running import Browser, Gateway

# A wrong value of a filter of each list.
WRONG = (
    *(f"tenants?{each}" for each in ("idle_days=abc", "suspended=maybe", "over_budget=much", "q=%00")),
    *("keys?state=odd", "keys?tenant=%00", "adapters?rank=many", "adapters?state=odd", "audit?since=never"),
    *("requests?since=never", "refusals?since=never", "usage?since=never"),
)
PAGED = (
    "tenants",
    "keys",
    "adapters",
    "plans",
    "prices",
    "engines/bases",
    "tenants/acme?tab=keys",
    "alerts?tab=targets",
)


@pytest.fixture
async def browser(gateway: Gateway) -> AsyncIterator[Browser]:
    await gateway.tenant("acme")
    async with gateway.browser() as browser:
        yield browser


async def test_a_wrong_filter_lists_nothing(browser: Browser):
    for path in WRONG:
        for suffix in ("", "&format=csv"):
            answer = await browser.get(f"/admin/{path}{suffix}")
            assert answer.status == 400, path + suffix
            assert b"acme" not in answer.body.replace(b"/admin/tenants/acme", b""), path + suffix
            assert b"Change all" not in answer.body
            assert b"matching" not in answer.body


async def test_a_page_after_the_end_says_so(browser: Browser):
    for path in PAGED:
        answer = await browser.get(f"/admin/{path}{'&' if '?' in path else '?'}page=999")
        page = answer.body.decode()
        assert answer.status == 200, path
        assert "The list ends before this page." in page, path
        assert "There are no" not in page, path
