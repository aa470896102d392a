"""Lists with a filter, with a wrong one, or at a page after their end."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from testing.gateway.running import Browser, Gateway, save_model

# A wrong value of a filter of each list.
WRONG = (
    *(f"tenants?{each}" for each in ("idle_days=abc", "suspended=maybe", "over_budget=much", "q=%00")),
    *("keys?state=odd", "keys?tenant=%00", "adapters?rank=many", "adapters?state=odd", "audit?since=never"),
    *("requests?since=never", "refusals?since=never", "usage?since=never"),
    *("plans?q=%00", "prices?q=%00", "engines/bases?q=%00"),
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


async def names(browser: Browser, path: str) -> list[str]:
    """Return the names of a list's rows, after a check that the file has the same ones."""
    page, file = (await browser.get(path)).body.decode().split("<main")[1], await browser.get(f"{path}&format=csv")
    rows = [re.sub("<[^>]+>", " ", each).split() for each in re.findall(r'<th scope="row".*?</th>', page, re.DOTALL)]
    found = [row[0] for row in rows]
    assert found == [line.split(",")[0] for line in file.body.decode().splitlines()[1:]]
    assert found or "matches this filter" in page
    return found


async def test_plans_prices_and_base_models_are_filtered(browser: Browser, gateway: Gateway, tmp_path: Path):
    admin = gateway.admin
    for path, body in (
        *((f"plans/{name}", {}) for name in ("gold", "silver")),
        *((f"prices/{name}", {"input": 1, "output": 1}) for name in ("base", "acme%2F*")),
    ):
        assert (await admin.call("PUT", f"/admin/api/{path}", json=body)).status == 200
    second = {"name": "second", "tokenizer": str(save_model(tmp_path / "second")), "digest": "ab" * 32}
    assert (await admin.post("/admin/api/bases", second)).status == 201
    for path, words in (
        ("plans", {"": ["gold", "silver"], "OLD": ["gold"], "iron": []}),
        ("prices", {"": ["acme/*", "base"], "Acme": ["acme/*"], "none": []}),
        ("engines/bases", {"": ["base", "second"], "SEC": ["second"], "abab": ["second"], "third": []}),
    ):
        for word, expected in words.items():
            assert await names(browser, f"/admin/{path}?q={word}") == expected, (path, word)
