"""Overview: numbers that a person can read, and what needs attention, in a real gateway."""

import html
import re
from datetime import UTC, datetime, timedelta

import pytest

from gateway.pages.overview import attention
from testing.gateway.running import Browser, Gateway, until


async def words(browser: Browser, path: str = "/admin/") -> str:
    """Return the text of the page, with single spaces."""
    answer = await browser.get(path)
    assert answer.status == 200, answer.body
    text = html.unescape(re.sub(r"<[^>]*>", " ", answer.body.decode().split("<main")[1]))
    return " ".join(text.split())


async def test_a_few_requests_are_a_number_and_many_are_a_rate_too(gateway: Gateway):
    acme = await gateway.tenant("acme")
    since = datetime.now(UTC) - timedelta(seconds=1)
    for _ in range(30):
        assert (await acme.complete()).status == 200
    async with gateway.browser() as browser:

        async def are_counted() -> bool:
            return "Requests 30 Output" in re.sub(r" [^ ]+ %[^%]*? than the period before| –", "", await words(browser))

        await until(are_counted)
        # The period is of whole minutes, two at most.
        assert re.search(r"Requests 30 · 0\.(25|5) per s ", await words(browser, f"/admin/?since={since:%FT%T}"))


async def test_refusals_of_the_last_hour_need_attention(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "FRESH_SECONDS", 0.0)
    acme, globex = [await gateway.tenant(name, requests_per_minute=1) for name in ("acme", "globex")]
    async with gateway.browser() as browser:
        assert "no tenant's limit refused a request in the last hour" in await words(browser)
        assert (await gateway.client("lpx_0000000000000000_").complete()).status == 401
        assert [(await acme.complete()).status for _ in range(3)] == [200, 429, 429]
        assert [(await globex.complete()).status for _ in range(2)] == [200, 429]
        text = "The limit requests per minute refused 3 requests of acme, globex in the last hour."

        async def is_listed() -> bool:
            return text in await words(browser)

        await until(is_listed)
        assert "Nothing needs your attention" not in await words(browser)
        [entry] = (await gateway.admin.get("/admin/api/attention")).json["data"]
        assert entry["act"] == {"title": "Why 429", "url": "/admin/refusals?period=1h&limit_name=requests_per_minute"}
        assert "3 requests were refused" not in (page := await words(browser, entry["act"]["url"]))
        assert "2 requests were refused by the limit requests per minute" in page
