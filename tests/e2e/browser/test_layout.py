"""Layout in a real browser: heights of rows, filters in one line, and labels of charts within their canvas."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from testing.browser import person
from testing.gateway.running import ADMIN_KEY, change_database, until
from tests.gateway.api.adapters.test_adapters import files, push

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Eight rows of this height fit the table's frame in a window of 900 px. Names of 64 characters need a line more.
MAX_ROW_PX, MAX_LONG_ROW_PX = 84, 100
HEIGHTS = "[...document.querySelectorAll('#events tbody tr')].map(each => each.getBoundingClientRect().height)"
# Bottoms of the filter's fields and of its button, which are alike in one line.
BOTTOMS = """[...document.querySelectorAll('[data-filters] > .field, [data-filters] > .button')]
    .map(each => Math.round(each.getBoundingClientRect().bottom))"""
# Notes the ends of every text that is drawn on a canvas.
NOTE_TEXTS = """
window.drawnTexts = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
    const half = this.measureText(text).width / 2;
    window.drawnTexts.push({text, right: x + (this.textAlign === "center" ? half : 0), room: this.canvas.width});
    return fillText.call(this, text, x, y, ...more);
};
"""
DRAW = """async chart => {
    const figure = document.querySelector("[data-chart]");
    delete figure.dataset.live;
    figure.dataset.chart = chart;
    window.drawnTexts = [];
    document.dispatchEvent(new CustomEvent("loraplex:chart", {detail: figure}));
    // uPlot draws in a microtask.
    await new Promise(done => setTimeout(done));
    return window.drawnTexts;
}"""

# Fills the tiles of times with long values. Returns the texts of tiles that leave their tile or overlap another text,
# and the number of values.
TILE_FAULTS = """() => {
    const values = [...document.querySelectorAll(".times .tile-value")], faults = [];
    for (const each of values) each.firstChild.textContent = "888 ms ";
    for (const tile of document.querySelectorAll(".tile")) {
        const frame = tile.getBoundingClientRect(), seen = [];
        const walker = document.createTreeWalker(tile, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            const text = walker.currentNode.textContent.trim();
            if (!text || walker.currentNode.parentElement.closest(".sr, svg")) continue;
            const range = document.createRange();
            range.selectNodeContents(walker.currentNode);
            for (const box of range.getClientRects()) {
                const isOver = other =>
                    box.left < other.right - 1 && other.left < box.right - 1 &&
                    box.top < other.bottom - 6 && other.top < box.bottom - 6;
                if (box.right > frame.right || box.bottom > frame.bottom || seen.some(isOver)) faults.push(text);
                seen.push(box);
            }
        }
    }
    return [faults, values.length];
}"""

# Frames of tables that scroll, and the cells that lie beyond their frame or the window.
SCROLLING = """() => {
    const found = [];
    for (const box of document.querySelectorAll("main .table-box")) {
        if (!box.checkVisibility()) continue;
        const name = box.getAttribute("aria-label"), frame = box.getBoundingClientRect();
        if (box.scrollWidth > box.clientWidth) found.push(`${name} scrolls sideways`);
        if (box.scrollHeight > box.clientHeight && !box.closest(".numbers")) found.push(`${name} scrolls`);
        for (const cell of box.querySelectorAll("th, td")) {
            const {left, right} = cell.getBoundingClientRect();
            const isBeyond = right > frame.right + 1 || right > innerWidth || left < 0;
            if (isBeyond || cell.scrollWidth > cell.clientWidth + 1) found.push(`${name}: ${cell.textContent}`);
        }
    }
    return [found, document.querySelectorAll("main .table-box td").length];
}"""

LINES = """cell => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return range.getClientRects().length;
}"""
HOME = "a-tenant-with-the-longest-name-that-is-allowed-and-more-than-that"[:64]


async def test_events_fill_a_narrow_window_with_low_rows(gateway, browser, tmp_path):
    for name in ("pager", "billing", "on-call"):
        url = {"url": f"https://hooks.example.com/{name}"}
        assert (await gateway.admin.call("PUT", f"/admin/api/webhooks/{name}", json=url)).status == 201
    tenants = ["acme", "globex", HOME]
    for name in tenants:
        await gateway.tenant(name)
        assert (await gateway.admin.call("PATCH", f"/admin/api/tenants/{name}", json={"suspended": True})).status == 200

    async def is_recorded() -> bool:
        return len((await gateway.admin.get("/admin/api/events")).json["data"]) >= len(tenants)

    await until(is_recorded)
    data = {"period": "month", "budget": 150_000_000, "spent": 123_456_789, "threshold": 0.8, "since": "2026-11-01"}
    await change_database(
        tmp_path, "UPDATE events SET type = 'budget.threshold', data = ? WHERE tenant IS NOT NULL", json.dumps(data)
    )

    async with person(browser, gateway.url, width=390) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/alerts")
        heights = await operator.page.evaluate(HEIGHTS)
        assert len(heights) >= len(tenants)
        assert sorted(heights)[-2] <= MAX_ROW_PX
        assert max(heights) <= MAX_LONG_ROW_PX
        assert not operator.problems


async def test_tables_fit_a_narrow_window_and_ids_of_the_audit_stay_whole_in_a_wide_one(gateway, browser):
    """Tables of ten columns were cut at the edge of a window of 390 px, and ids broke in the last letters at 1,280."""
    acme = await gateway.tenant(HOME, tokens_per_minute=50)
    for i, name in enumerate(("small", "m" * 64)):
        assert (await push(acme, name, files(i))).status == 201
    assert (await acme.chat(stream=True, max_tokens=4)).status == 200
    assert (await acme.chat(max_tokens=40)).status == 429
    paths = ("audit", "adapters", "fairness", "refusals", "requests", "tenants", "keys", "engines")
    async with person(browser, gateway.url, width=390) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        for path in (*(f"/admin/{each}" for each in paths), f"/admin/tenants/{HOME}/adapters/small"):
            await operator.find(path, "main .blocks td[data-label]")
            found, count = await operator.page.evaluate(SCROLLING)
            assert count
            assert found == [], path
        await operator.page.set_viewport_size({"width": 1280, "height": 900})
        await operator.open("/admin/audit?action=key.create")
        frame = operator.page.locator("#audit-box")
        assert await frame.evaluate("box => box.scrollWidth <= box.clientWidth")
        # An id of 16 digits is one line.
        assert await frame.locator("td.id.mono").first.evaluate(LINES) == 1
        assert not operator.problems


async def test_six_filters_and_their_button_share_a_line_at_1280_px(gateway, browser):
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        for path in ("/admin/tenants", "/admin/audit", "/admin/adapters", "/admin/audit?action=key"):
            await operator.open(path)
            bottoms = await operator.page.evaluate(BOTTOMS)
            assert (len(bottoms), len(set(bottoms))) == (7, 1), path


async def test_the_last_label_of_a_charts_time_axis_is_not_cut_off(gateway, upstream, browser):
    async with person(browser, gateway.url) as operator:
        await operator.page.add_init_script(NOTE_TEXTS)
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open(f"/admin/engines/one?url={upstream.url}")
        midnight = datetime(2026, 11, 29, tzinfo=UTC)
        for step, last in (
            (timedelta(hours=1), "00:00"),
            (timedelta(seconds=10), "00:04:00"),
            (timedelta(days=1), "12-23"),
        ):
            times = [(midnight + i * step).timestamp() for i in range(25)]
            chart = {"times": times, "unit": "", "stacked": False, "series": [{"name": "a", "values": [1] * 25}]}
            texts = await operator.page.evaluate(DRAW, json.dumps(chart))
            assert last in {each["text"] for each in texts}
            assert [each for each in texts if each["right"] > each["room"]] == []
        assert not operator.problems


async def test_texts_of_tiles_lie_apart_and_within_their_tile(gateway, browser):
    """Percentiles of three digits lay over each other's names, and the last one left its tile."""
    await (await gateway.tenant("acme")).chat(stream=True, max_tokens=4)
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        await operator.open("/admin/")
        for width in (1400, 1280, 1000, 768, 390):
            await operator.page.set_viewport_size({"width": width, "height": 900})
            faults, count = await operator.page.evaluate(TILE_FAULTS)
            assert count >= 6
            assert not faults, width


async def test_reports_of_usage_have_one_scroll_bar_and_all_their_columns(gateway, browser, tmp_path):
    """The last requests of a tenant lost their column Total, and their frame had bars beside those of the page."""
    acme = await gateway.tenant(HOME)
    assert (
        await gateway.admin.call("PUT", "/admin/api/prices/*", json={"input": 10**8, "output": 10**9})
    ).status == 200
    names = [f"{i}-{'m' * 62}" for i in range(9)]
    for i, name in enumerate(names):
        assert (await push(acme, name, files(i))).status == 201
        assert (await acme.chat(model=name, user="u" * 64, max_tokens=8)).status == 200

    assert (await push(await gateway.tenant("fresh"), "unused", files(1))).status == 201
    made = datetime.now(UTC) - timedelta(minutes=53)
    await change_database(tmp_path, "UPDATE adapters SET created_at = ?", made.strftime("%Y-%m-%d %H:%M:%S.%f"))

    async def are_recorded() -> bool:
        return len((await gateway.admin.get("/admin/api/usage?group_by=model")).json["data"]) == len(names)

    await until(are_recorded)
    home = (await gateway.admin.get("/admin/api/tenants")).json["data"][0]["name"]
    groups = [f"/admin/usage?group_by={each}" for each in ("tenant", "model", "key", "end_user", "day")]
    async with person(browser, gateway.url) as operator:
        await operator.log_in("/admin", ADMIN_KEY)
        for path in (f"/admin/tenants/{home}", "/admin/tenants/fresh", *groups):
            await operator.find(path, "main .report td.n")
            for width in (1280, 390):
                await operator.page.set_viewport_size({"width": width, "height": 900})
                for each in await operator.page.locator("details.numbers:not([open]) > summary").all():
                    await each.click()
                found, count = await operator.page.evaluate(SCROLLING)
                assert count
                assert found == [], (path, width)
            if home in path:
                total = operator.page.get_by_label("Table of the last requests").locator("td").last
                assert (await total.get_attribute("data-label"), "ms" in await total.inner_text()) == ("Total", True)
        assert not operator.problems
