"""Page of refusals: numbers, causes in sentences, links to the requests, and reserved against settled tokens."""

import csv
import html
import io
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.api.admin.refusals import AdminRefusals
from gateway.errors import Exceeded
from gateway.pages.requests.log import RequestPages
from gateway.pages.requests.refusals import RefusalPages
from gateway.records.requests.log import RequestLog
from gateway.records.requests.refusal_report import RefusalReport
from gateway.records.sql.database import Database
from testing.gateway.rows import row
from tests.gateway.pages.conftest import Reader, World
from tests.gateway.pages.records import HOSTILE, fill, refused, serving, unsafe


@pytest.fixture
async def reader(starts_servers: None, world: World, database: Database) -> AsyncIterator[Reader]:
    report = RefusalReport(database)
    pages = RefusalPages(world.frame, report, "EUR")
    handlers = {
        "/admin/refusals": pages.page,
        "/admin/api/refusals": AdminRefusals(report=report).get,
        "/admin/requests": RequestPages(world.frame, RequestLog(database), "EUR").list,
    }
    async with serving(handlers) as reader:
        yield reader


def plain(text: str) -> str:
    """Return the text of a page without its tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def chart(text: str) -> dict[str, int]:
    """Return the sums of the chart's series by name."""
    [data] = re.findall(r'data-chart="([^"]*)"', text)
    return {each["name"]: sum(each["values"]) for each in json.loads(html.unescape(data))["series"]}


def an_hour_ago(minutes: int = 0, seconds: int = 0) -> datetime:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    return hour + timedelta(minutes=minutes, seconds=seconds)


async def test_the_page_says_why_a_tenant_got_429s_at_a_time(reader: Reader, database: Database):
    exceeded = Exceeded(name="requests_per_minute", owner="key", value=60, needed=1, remaining=0, retry_after=9)
    await fill(
        database,
        *(refused(i, at=an_hour_ago(40, i)) for i in range(20)),
        *(refused(i, at=an_hour_ago(41, i - 20)) for i in range(20, 25)),
        *(refused(30 + i, at=an_hour_ago(10), exceeded=exceeded) for i in range(3)),
        refused(40, at=an_hour_ago(40), tenant_id="t2", tenant="globex"),
    )
    at = f"{an_hour_ago(40):%H:%M}"
    _, text = await reader.get(f"/admin/refusals?tenant=acme&at={at}")
    # In the hour after midnight the page adds the day.
    shown = plain(text).replace(f"{an_hour_ago():%d %b} ", "")
    assert (
        f"acme : 25 requests were refused by the limit tokens per minute of the tenant (20,000 tokens), from "
        f"{an_hour_ago(40):%H:%M:%S} to {an_hour_ago(41, 4):%H:%M:%S}, most at {at} (20). On average a refused request "
        "needed 4,096 tokens, and 310 tokens were left. The longest wait was 12 s." in shown
    )
    assert "globex" not in shown
    assert "requests per minute" not in shown
    [link] = re.findall(r'href="([^"]+)">See the requests', text)
    _, log = await reader.get(html.unescape(link))
    assert len(re.findall(r'<th scope="row"><a href="/admin/requests/', log)) == 25


async def test_limits_of_one_name_are_shown_on_their_own(reader: Reader, database: Database):
    """A key's limit, and the tenant's before and after it was raised."""

    def exceeded(owner: str, value: int, needed: int, retry_after: int) -> Exceeded:
        limit: dict[str, Any] = {"owner": owner, "value": value, "needed": needed, "retry_after": retry_after}
        return Exceeded(name="tokens_per_minute", remaining=10, **limit)

    await fill(
        database,
        *(refused(i, at=an_hour_ago(40), exceeded=exceeded("tenant", 20_000, 4_000, i)) for i in range(5)),
        *(refused(10 + i, at=an_hour_ago(41), exceeded=exceeded("tenant", 30_000, 9_000, 3)) for i in range(3)),
        *(refused(20 + i, at=an_hour_ago(42), exceeded=exceeded("key", 500, 100, 50 + i)) for i in range(2)),
    )
    shown = plain((await reader.get("/admin/refusals?tenant=acme"))[1])
    assert "acme : 10 requests were refused by the limit tokens per minute, from " in shown
    for line in (
        "Limit of the tenant (20,000 tokens): 5 of the recorded refusals. On average a refused request needed 4,000 "
        "tokens, and 10 tokens were left. The longest wait was 4 s.",
        "Limit of the tenant (30,000 tokens): 3 of the recorded refusals. On average a refused request needed 9,000 "
        "tokens, and 10 tokens were left. The longest wait was 3 s.",
        "Limit of the key (500 tokens): 2 of the recorded refusals. On average a refused request needed 100 tokens, "
        "and 10 tokens were left. The longest wait was 51 s.",
    ):
        assert line in shown


CUT = {"status": "limited", "error_code": "rate_limit_exceeded", "limit_name": "tokens_per_day"}


async def test_answers_that_a_limit_cut_have_words_of_their_own(reader: Reader, database: Database):
    after_admission: dict[str, Any] = {"exceeded": None, "status": 0}
    await fill(
        database,
        *(refused(i, at=an_hour_ago(40), code="rate_limit_exceeded", **after_admission) for i in range(2)),
        *(row(f"req_c{i}", created_at=an_hour_ago(40), **CUT) for i in range(3)),
        refused(10, at=an_hour_ago(40), code="engine_error", **after_admission),
    )
    _, text = await reader.get("/admin/refusals?status=all")
    assert "acme : 2 answers were cut in mid-stream by a limit, at " in plain(text).replace("from", "at")
    assert "acme : 1 request failed after admission with the code engine_error, at " in plain(text)
    assert "acme : 3 answers were cut in mid-stream by the limit tokens per day, most " in plain(text)
    assert re.search(r"acme cut in mid-stream rate_limit_exceeded 2 ", plain(text))
    assert re.search(r"acme tokens per day cut in mid-stream rate_limit_exceeded 3 ", plain(text))
    # The page shows them by default, beside the refusals of the same code, and links to them.
    await fill(database, refused(50, at=an_hour_ago(40)))
    _, text = await reader.get("/admin/refusals")
    assert "1 request was refused by the limit tokens per minute" in plain(text)
    assert "3 answers were cut in mid-stream by the limit tokens per day" in plain(text)
    assert "engine_error" not in text
    [link] = set(re.findall(r'href="([^"]*limit_name=tokens_per_day[^"]*)">See the requests', text))
    _, log = await reader.get(html.unescape(link))
    assert len(re.findall(r'<th scope="row"><a href="/admin/requests/', log)) == 3
    _, text = await reader.get("/admin/refusals?status=all&format=csv")
    rows = [(each["outcome"], each["code"]) for each in csv.DictReader(io.StringIO(text))]
    cut = ("cut", "rate_limit_exceeded")
    assert rows == [cut, cut, ("failed", "engine_error"), ("refused", "rate_limit_exceeded")]


async def test_a_budget_that_was_only_reserved_has_advice_of_its_own(reader: Reader, database: Database):
    exceeded = Exceeded(name="budget_per_day", owner="tenant", value=10**6, needed=9, remaining=0, retry_after=1)
    await fill(database, refused(1, at=an_hour_ago(), exceeded=exceeded))
    shown = plain((await reader.get("/admin/refusals"))[1])
    assert "Running requests reserved the budget" in shown
    assert "The budget is spent" not in shown


async def test_the_peak_of_a_long_period_names_its_step(reader: Reader, database: Database):
    await fill(database, *(refused(i, at=an_hour_ago(40, i)) for i in range(3)))
    # With the date, if it is not today's.
    quarter = rf"most in the 15 minutes from (\d+ \w+ )?{an_hour_ago(30):%H:%M} \(3\)\."
    assert re.search(quarter, plain((await reader.get("/admin/refusals?period=24h"))[1]))
    at = an_hour_ago()
    assert " most in the hour from " in plain((await reader.get("/admin/refusals?period=7d"))[1])
    assert f" most on {at.day} {at:%b} (3)." in plain((await reader.get("/admin/refusals?period=30d"))[1])


async def test_the_chart_and_the_table_agree(reader: Reader, database: Database):
    overloaded = {"exceeded": None, "code": "server_overloaded"}
    await fill(
        database,
        *(refused(i, at=an_hour_ago(i)) for i in range(4)),
        *(refused(10 + i, at=an_hour_ago(i), tenant_id="t2", tenant="globex", **overloaded) for i in range(3)),
        refused(20, at=an_hour_ago(), status=404, code="model_not_found", exceeded=None),
    )
    _, text = await reader.get("/admin/refusals")
    assert chart(text) == {"tokens per minute": 4, "server overloaded": 3}
    assert "7 refused" in plain(text)
    _, text = await reader.get("/admin/refusals?group_by=tenant&status=all")
    assert chart(text) == {"acme": 5, "globex": 3}
    _, text = await reader.get("/admin/refusals?status=all&format=csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(each["tenant"], each["code"], each["requests"]) for each in rows] == [
        ("acme", "rate_limit_exceeded", "4"),
        ("globex", "server_overloaded", "3"),
        ("acme", "model_not_found", "1"),
    ]


async def test_more_groups_than_colours_are_others(reader: Reader, database: Database):
    many = (refused(i, at=an_hour_ago(), tenant_id=f"t{i}", tenant=f"n{i:02}") for i in range(12))
    await fill(database, *many)
    _, text = await reader.get("/admin/refusals?group_by=tenant")
    assert chart(text) == {f"n{i:02}": 1 for i in range(8)} | {"others": 4}


async def test_requests_without_a_key_are_counted_but_belong_to_no_tenant(reader: Reader, database: Database):
    await fill(database, refused(1, at=an_hour_ago(), tenant_id="", tenant="", key_id="", exceeded=None, status=401))
    _, text = await reader.get("/admin/refusals?status=all&group_by=tenant")
    assert "Unknown callers" in plain(text)
    assert chart(text) == {"requests without a valid key": 1}


async def test_unused_reservations_by_tenant(reader: Reader, database: Database):
    at = an_hour_ago(5)
    await fill(
        database,
        row("req_1", created_at=at, reserved_tokens=1000, prompt_tokens=50, completion_tokens=40, surcharge=10),
        row("req_2", created_at=at, reserved_tokens=200, prompt_tokens=50, completion_tokens=50),
        row("req_3", created_at=at, tenant_id="t2", tenant="globex", reserved_tokens=100, prompt_tokens=90),
        row("req_4", created_at=at - timedelta(days=3), tenant_id="t3", tenant="initech", reserved_tokens=9000),
        row("req_5", created_at=at, tenant_id="t4", tenant="umbrella"),
    )
    _, text = await reader.get("/admin/refusals?period=7d")
    shown = plain(text)
    assert re.search(r"acme 2 1,200 200 1,000 83 %", shown)
    assert re.search(r"globex 1 100 95 5 5 %", shown)
    assert "initech" not in shown
    assert "umbrella" not in shown
    # Its order is its own: the table above has another one.
    assert 'href="/admin/refusals?period=7d&amp;reserved_sort=-settled"' in text
    assert 'href="/admin/refusals?period=7d&amp;format=csv&amp;table=reserved"' in text
    for order, expected in (("unused", ["globex", "acme"]), ("-settled", ["acme", "globex"])):
        _, text = await reader.get(f"/admin/refusals?period=7d&reserved_sort={order}")
        [body] = re.findall(r'id="reserved">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
        names = [plain(each) for each in re.findall(r'<th scope="row">(.*?)</th>', body, re.DOTALL)]
        assert names == expected, order
    assert (await reader.get("/admin/refusals?reserved_sort=limit_name&format=csv"))[0].status == 400


async def test_the_json_route_has_the_same_figures(reader: Reader, database: Database):
    await fill(database, *(refused(i, at=an_hour_ago(40, i)) for i in range(5)))
    _, text = await reader.get("/admin/api/refusals?tenant=acme")
    found = json.loads(text)
    [cause] = found["causes"]
    assert (found["total"], cause["requests"], cause["limit_name"]) == (5, 5, "tokens_per_minute")
    [evidence] = cause["evidence"]
    assert (evidence["value"], evidence["needed"], evidence["longest_wait"]) == (20_000, 4_096, 12)
    assert cause["outcome"] == "refused"
    assert sum(found["curves"]["tokens_per_minute"]) == 5
    assert (await reader.get("/admin/api/refusals?status=ok"))[0].status == 400


async def test_a_period_without_refusals_leads_on(reader: Reader):
    _, text = await reader.get("/admin/refusals")
    assert "No request was refused in this period." in text
    assert 'href="/admin/refusals?period=30d"' in text


async def test_a_wrong_period_is_named(reader: Reader):
    for query, expected in {
        "at=25:00": "at",
        "since=2026-01-02&until=2026-01-01": "since",
        "since=2090-01-01": "since",
    }.items():
        response, text = await reader.get(f"/admin/refusals?{query}")
        assert response.status == 400, query
        assert f'<small class="error" id="e-{expected}">' in text
    for query in ("period=1y", "group_by=colour", "status=ok", "sort=x"):
        response, text = await reader.get(f"/admin/refusals?{query}")
        assert response.status == 400, query
        assert "expected" in text


async def test_links_of_the_table_carry_the_period(reader: Reader, database: Database):
    await fill(database, refused(1, at=an_hour_ago(30)))
    _, text = await reader.get("/admin/refusals?period=24h")
    [link] = re.findall(r'<td class="n" data-label="Refused"><a href="([^"]+)">1</a>', text)
    query = parse_qs(urlsplit(html.unescape(link)).query)
    assert query["limit_name"] == ["tokens_per_minute"]
    assert query["status"] == ["not_admitted"]
    assert query["since"][0] < f"{an_hour_ago(30):%Y-%m-%dT%H:%M:%S}" < query["until"][0]


async def test_hostile_texts_are_inert(reader: Reader, database: Database):
    hostile = refused(1, at=an_hour_ago(), tenant=HOSTILE[:64], code=HOSTILE[:60], exceeded=None)
    await fill(database, hostile, row("req_1", tenant=HOSTILE[:64], created_at=an_hour_ago(), reserved_tokens=9))
    for query in ("", "?group_by=tenant", "?group_by=code", f"?tenant={HOSTILE[:20]}&at=%3Cb%3E"):
        _, text = await reader.get(f"/admin/refusals{query}")
        assert unsafe(text) == []
