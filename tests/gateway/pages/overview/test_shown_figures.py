"""Figures of the overview: percentiles with their change from the period before, and the charts of each grouping."""

import html
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from gateway.access.sessions import VISITOR
from gateway.pages.overview.attention import Needs
from gateway.pages.overview.page import Overview
from gateway.records.activity.report import Activity
from gateway.records.attention import Concerns
from gateway.records.sql.database import Database
from testing.gateway.rows import NOON, row
from tests.gateway.pages.conftest import Reader, World
from tests.gateway.pages.records import fill, refused, serving

# The figures are made from the rows of either database by the same code.
pytestmark = pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
PAGE = "/admin/?since=2026-01-01T12:00&until=2026-01-01T13:00"


class Nothing:
    """Reader of no concerns, and a ledger without rows that wait."""

    waiting = rejected = 0

    async def read(self) -> Concerns:
        return Concerns([], [], [], [], [], [])


@pytest.fixture
async def reader(starts_servers: None, world: World, database: Database) -> AsyncIterator[Reader]:
    nothing: Any = Nothing()
    idle: Any = SimpleNamespace(utilisation=lambda _: None)
    page = Overview(
        frame=world.frame,
        strip=world.strip,
        activity=Activity(database),
        needs=Needs(nothing, nothing, str),
        history=idle,
    )

    async def show(request: web.Request) -> web.StreamResponse:
        request[VISITOR] = world.visitor
        return await page.page(request)

    async with serving({"/admin/": show}) as reader:
        yield reader


def plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


async def test_tiles_have_the_percentiles_of_both_times_and_their_changes(reader: Reader, database: Database):
    # A percentile is taken to lie evenly within its bucket, the last of which ends at the longest time: 35 to 50 ms (in
    # the period before: 40), 75 to 80, 300 to 400, 1000 to 1200.
    now = [row(f"req_n{i:02}", ttft_ms=40 if i < 90 else 80, latency_ms=400, created_at=NOON) for i in range(100)]
    earlier = NOON - timedelta(minutes=30)
    before = [row(f"req_b{i:02}", ttft_ms=40, latency_ms=1200, created_at=earlier) for i in range(100)]
    await fill(database, *now, *before)
    _, text = await reader.get(PAGE)
    tiles = [plain(each) for each in re.findall(r'<div class="tile times">(.*?)</div>', text, re.DOTALL)]
    than = "than the period before"
    assert tiles == [
        f"Time to first token 43 ms p50 ▲ 15 % more {than} 77 ms p95 ▲ 94 % more {than} 79 ms p99 ▲ 98 % more {than}",
        f"Time of a whole answer 350 ms p50 ▼ 68 % less {than} 394 ms p95 ▼ 67 % less {than} "
        f"398 ms p99 ▼ 67 % less {than}",
    ]


async def test_tiles_without_requests_have_no_percentiles(reader: Reader):
    _, text = await reader.get(PAGE)
    tiles = [plain(each) for each in re.findall(r'<div class="tile times">(.*?)</div>', text, re.DOTALL)]
    assert tiles == [f"{title} – p50 – – p95 – – p99 –" for title in ("Time to first token", "Time of a whole answer")]


@pytest.mark.parametrize(
    ("group", "requests"),
    [
        ("tenant", {"acme": 3, "globex": 1}),
        ("model", {"base": 2, "acme/pirate": 1, "globex/pirate": 1}),
        ("engine", {"http://e": 3, "http://f": 1}),
    ],
)
async def test_charts_have_a_series_for_each_group(reader: Reader, database: Database, group: str, requests: Any):
    pirate = {"model": "pirate", "adapter_digest": "d" * 64}
    globex = {"tenant_id": "t2", "tenant": "globex", "engine": "http://f"}
    earlier = NOON - timedelta(hours=1)
    await fill(
        database,
        row("req_1"),
        row("req_2", created_at=earlier),
        row("req_3", **pirate),
        row("req_4", **pirate, **globex),
    )
    _, text = await reader.get(f"/admin/?since=2026-01-01T11:00&until=2026-01-01T13:00&by={group}")
    for name, title, of_one in (
        ("requests", f"Requests by {group}", 1),
        ("tokens", f"Tokens out by {group}", 5),
        ("cost", f"Cost by {group}", 0.000007),
    ):
        [data] = re.findall(rf'id="chart-{name}" data-chart="([^"]*)"', text)
        chart = json.loads(html.unescape(data))
        assert chart["stacked"]
        # Costs are sums of each step, the others rates.
        step = 1 if name == "cost" else chart["times"][1] - chart["times"][0]
        found = {each["name"]: sum(each["values"]) * step for each in chart["series"]}
        expected = {group: number * of_one for group, number in requests.items()}
        assert found == pytest.approx(expected, rel=0.05), name
        assert f"<b>{title}</b>" in text


async def test_reasons_of_failures_have_names_of_their_own(reader: Reader, database: Database):
    """A code with two statuses had two series of the same name, and reasons after the eighth had no series.

    Names are words, as on the page "Why 429", and the numbers have a unit.
    """
    code, at = "invalid_request_error", {"at": NOON, "exceeded": None, "code": "invalid_request_error"}
    others = [refused(i, at=NOON, exceeded=None, code=f"other_{i}") for i in range(10, 20)]
    await fill(
        database,
        *(refused(i, **at, status=status) for i, status in enumerate((400, 400, 400, 404, 404))),
        *(row(f"req_{i}", status="failed", error_code=code, created_at=NOON) for i in range(2)),
        *(refused(i, at=NOON) for i in (7, 8)),
        *others,
    )
    _, text = await reader.get("/admin/?since=2026-01-01T11:00&until=2026-01-01T13:00")
    [data] = re.findall(r'id="chart-failed" data-chart="([^"]*)"', text)
    chart = json.loads(html.unescape(data))
    assert chart["unit"] == "requests per hour"
    series = [(each["name"], sum(each["values"])) for each in chart["series"]]
    assert series[0] == ("invalid request error (400)", 3)
    assert set(series[1:4]) == {
        ("invalid request error (404)", 2),
        ("invalid request error (after admission)", 2),
        ("tokens per minute", 2),
    }
    assert [name for name, _ in series[4:8]] == [each.code.replace("_", " ") for each in others[:4]]
    assert series[8:] == [("6 others", 6)]


@pytest.mark.parametrize(("period", "step"), [("1h", "minute"), ("24h", "15 minutes"), ("30d", "day")])
async def test_reasons_that_share_a_limit_have_their_codes_and_the_unit_has_the_step(
    reader: Reader, database: Database, period: str, step: str
):
    codes, at = ("rate_limit_exceeded", "insufficient_quota"), datetime.now(UTC) - timedelta(minutes=5)
    await fill(database, *(refused(i, at=at, code=code) for i, code in enumerate(codes)))
    _, text = await reader.get(f"/admin/?period={period}")
    [data] = re.findall(r'id="chart-failed" data-chart="([^"]*)"', text)
    chart = json.loads(html.unescape(data))
    assert chart["unit"] == f"requests per {step}"
    assert {each["name"] for each in chart["series"]} == {
        "tokens per minute (rate limit exceeded)",
        "tokens per minute (insufficient quota)",
    }
