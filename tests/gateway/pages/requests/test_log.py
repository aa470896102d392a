"""Pages of the request log: what it shows, its filters, its exports, one request, and hostile texts."""

import csv
import io
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from html import unescape

import msgspec
import pytest

from gateway.pages.requests.log import RequestPages, trace_link
from gateway.records.requests.log import RequestLog
from gateway.records.sql.database import Database
from testing.gateway.rows import NOON, row
from tests.gateway.pages.conftest import Reader, World
from tests.gateway.pages.records import HOSTILE, fill, refused, serving, unsafe


@pytest.fixture
async def reader(starts_servers: None, world: World, database: Database) -> AsyncIterator[Reader]:
    pages = RequestPages(world.frame, RequestLog(database), "EUR")
    handlers = {
        "/admin/requests": pages.list,
        "/admin/requests/{id}": pages.one,
        "/admin/tenants/{tenant}": pages.list,
    }
    async with serving(handlers) as reader:
        yield reader


def shown(text: str) -> list[str]:
    """Return the ids of the requests that a page lists."""
    return re.findall(r'<th scope="row"><a href="/admin/requests/([^"]+)"', text)


async def test_admitted_and_refused_requests_are_in_one_list(reader: Reader, database: Database):
    await fill(database, row("req_a1", created_at=NOON, cost=1_500_000, cached_tokens=2), refused(1))
    response, text = await reader.get("/admin/requests")
    assert response.status == 200
    assert shown(text) == ["req_r01", "req_a1"]
    assert "refused 429" in text
    assert "tokens per minute" in text
    assert re.search(r'title="1.50 EUR"', text)
    assert "2 cached" in text
    assert '<a href="/admin/tenants/acme">acme</a>' in text


async def test_each_filter_narrows_the_list(reader: Reader, database: Database):
    rows = [
        row("req_a1", created_at=NOON, latency_ms=2000, end_user="ann", version=3, model="pirate"),
        row("req_a2", created_at=NOON + timedelta(hours=1), tenant="globex", tenant_id="t2", engine="http://e2"),
        row("req_a3", created_at=NOON, status="error", error_code="engine_error", key_id="k2"),
    ]
    await fill(database, *rows, refused(1))
    for query, ids in {
        "tenant=globex": ["req_a2"],
        "model=pirate&status=ok": ["req_a1"],
        "version=3": ["req_a1"],
        "key=k2": ["req_a3"],
        "engine=http://e2": ["req_a2"],
        "status=failed": ["req_r01", "req_a3"],
        "code=engine_error": ["req_a3"],
        "limit_name=tokens_per_minute": ["req_r01"],
        "end_user=ann": ["req_a1"],
        "min_latency_ms=1000": ["req_a1"],
        "since=2026-01-01T12:30": ["req_a2"],
        "until=2026-01-01T12:00:30": ["req_a3", "req_a1"],
        # A form sends the fields that are left empty too.
        "tenant=globex&model=&since=&version=&id=": ["req_a2"],
    }.items():
        _, text = await reader.get(f"/admin/requests?{query}")
        assert shown(text) == ids, query


async def test_a_wrong_filter_is_named_at_its_field(reader: Reader):
    for query, name in {"since=yesterday": "since", "version=x": "version", "status=what": "status"}.items():
        response, text = await reader.get(f"/admin/requests?{query}")
        assert response.status == 400
        assert re.search(rf'<small class="error" id="e-{name}">[^<]*expected', text, re.IGNORECASE), query


async def test_pages_lead_to_the_end(reader: Reader, database: Database):
    await fill(database, *(row(f"req_{i:03}", created_at=NOON + timedelta(seconds=i)) for i in range(120)))
    path, seen = "/admin/requests?tenant=acme", []
    while path:
        _, text = await reader.get(path)
        seen += shown(text)
        found = re.search(r'rel="next" href="([^"]+)"', text)
        path = found[1].replace("&amp;", "&") if found else ""
        assert not path or "tenant=acme" in path
    assert seen == [f"req_{i:03}" for i in reversed(range(120))]


async def test_an_id_leads_to_its_page(reader: Reader, database: Database):
    await fill(database, row("req_a1"))
    response, text = await reader.get("/admin/requests?id=chatcmpl-a1")
    assert response.url.path == "/admin/requests/chatcmpl-a1"
    assert '<span class="mono">req_a1</span>' in text


async def test_exports_have_every_entry_of_the_filter_and_no_other(reader: Reader, database: Database):
    many = [row(f"req_{i:03}", created_at=NOON + timedelta(seconds=i), cost=i) for i in range(450)]
    await fill(database, *many, row("req_x", tenant="globex", tenant_id="t2"), refused(5))
    response, text = await reader.get("/admin/requests?tenant=acme&format=csv")
    assert response.headers["Content-Disposition"] == 'attachment; filename="requests.csv"'
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 451
    assert {each["tenant"] for each in rows} == {"acme"}
    assert sum(int(each["cost_micros"]) for each in rows) == sum(range(450))
    _, text = await reader.get("/admin/requests?tenant=acme&format=json")
    entries = json.loads(text)
    assert [each["request_id"] for each in entries] == [each["request_id"] for each in rows]
    [limited] = [each for each in entries if each["http_status"] == 429]
    assert (limited["limit_name"], limited["limit_value"], limited["currency"]) == ("tokens_per_minute", 20_000, "EUR")
    _, text = await reader.get("/admin/requests?tenant=nobody&format=json")
    assert json.loads(text) == []
    response, text = await reader.get("/admin/requests?format=xls")
    assert (response.status, json.loads(text)["error"]["param"]) == (400, "format")


async def test_the_way_of_a_request(reader: Reader, database: Database):
    timed = row(
        "req_a1",
        admission_ms=10,
        queue_ms=40,
        ttft_ms=200,
        latency_ms=1000,
        prompt_tokens=100,
        completion_tokens=41,
        reserved_tokens=612,
        adapter_digest="ab" * 32,
        served_digest="ab" * 32,
        end_user="ann",
    )
    await fill(database, timed)
    _, text = await reader.get("/admin/requests/req_a1")
    lanes = re.findall(r'aria-label="(\w[\w ]*): from (\d+) ms to (\d+) ms"', text)
    assert lanes == [
        ("Admission", "0", "10"),
        ("Queue", "10", "50"),
        ("First token", "50", "200"),
        ("Answer", "200", "1000"),
    ]
    assert "141 of 612 reserved tokens used" in text
    assert "471 were released at the end" in text
    assert "50 tokens/s after the first token" in text
    assert "the same adapter" in text
    [around] = re.findall(r'href="([^"]+)">Requests of this tenant within a minute', text)
    assert "since=2026-01-01T11%3A59%3A00&amp;until=2026-01-01T12%3A01%3A01" in around


async def test_a_request_links_to_its_trace(world: World, database: Database, starts_servers: None):
    await fill(database, row("req_a1", created_at=NOON, latency_ms=1000))
    url = "https://traces.example/?tags=%7B%22id%22%3A%22{request_id}%22%7D&from={since}&to={until}"
    pages = RequestPages(world.frame, RequestLog(database), "EUR", url)
    async with serving({"/admin/requests/{id}": pages.one}) as reader:
        _, text = await reader.get("/admin/requests/req_a1")
        [shown] = re.findall(r'href="([^"]+)" rel="noreferrer">Trace</a>', text)
        at = 1000 * int(NOON.timestamp())
        times = f"&from={at - 61_000}&to={at + 61_000}"
        assert unescape(shown) == f"https://traces.example/?tags=%7B%22id%22%3A%22req_a1%22%7D{times}"
        world.visitor = world.person("tenant_admin")
        _, text = await reader.get("/admin/requests/req_a1")
        assert "traces.example" not in text


async def test_a_trace_link_escapes_the_id(database: Database):
    await fill(database, row("req_a1"))
    entry = await RequestLog(database).find("req_a1")
    assert entry is not None
    hostile = msgspec.structs.replace(entry, request_id="req_&x=1#'\"{since}")
    assert trace_link("https://t.example/{request_id}", hostile) == (
        "https://t.example/req_%26x%3D1%23%27%22%7Bsince%7D"
    )


async def test_a_row_without_times_still_has_a_page(reader: Reader, database: Database):
    await fill(database, row("req_old"), row("req_odd", admission_ms=9, queue_ms=9, ttft_ms=5, latency_ms=3))
    for request_id in ("req_old", "req_odd"):
        response, text = await reader.get(f"/admin/requests/{request_id}")
        assert response.status == 200
        assert "Answer" in text


async def test_a_refused_request_says_which_limit_it_met(reader: Reader, database: Database):
    await fill(database, refused(1))
    _, text = await reader.get("/admin/requests/req_r01")
    assert (
        "The limit tokens per minute of the tenant is 20,000 tokens. The request needed 4,096 tokens, and 310 tokens "
        "were left." in text
    )
    assert 'href="/admin/refusals?tenant=acme&amp;since=' in text


async def test_an_unknown_id_says_what_an_id_looks_like(reader: Reader):
    for given in ("req_gone", "nonsense"):
        response, text = await reader.get(f"/admin/requests/{given}")
        assert response.status == 404
        assert given in text
        assert "chatcmpl-" in text


async def test_hostile_texts_are_inert(reader: Reader, database: Database):
    hostile = {"model": HOSTILE, "end_user": HOSTILE, "tenant": HOSTILE[:64]}
    await fill(
        database,
        row("req_a1", engine=HOSTILE, finish_reason=HOSTILE[:30], **hostile),
        refused(1, code=HOSTILE[:60], param=HOSTILE[:60], address=HOSTILE, **hostile),
        row("req_a2", model='=HYPERLINK("http://evil")', end_user="@SUM(A1)"),
    )
    pages = [f"/admin/requests/{name}" for name in ("req_a1", "req_r01", HOSTILE.replace("/", ""))]
    for path in ("/admin/requests", "/admin/requests?tenant=" + HOSTILE, *pages):
        _, text = await reader.get(path.replace("<", "%3C").replace("#", "%23"))
        assert unsafe(text) == []
    _, text = await reader.get("/admin/requests?format=csv&status=ok")
    assert {each["model"] for each in csv.DictReader(io.StringIO(text))} >= {'\'=HYPERLINK("http://evil")'}


async def test_the_live_list_is_off_at_first(reader: Reader, database: Database):
    await fill(database, row("req_a1", created_at=datetime.now(UTC)))
    _, text = await reader.get("/admin/requests")
    assert "data-live" not in text
    _, text = await reader.get("/admin/requests?live=1")
    assert '<div id="log" data-live="2">' in text
