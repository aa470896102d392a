"""The request log: usage rows and refused requests as one list, filtered, in pages of bounded cost."""

from datetime import timedelta
from typing import Any

import pytest

from gateway.billing.writer import UsageWriter
from gateway.errors import BadRequest, Exceeded
from gateway.records.requests import log as request_log
from gateway.records.requests.log import LogFilter, RequestLog
from gateway.records.requests.refused import RefusalLog, RefusedRequest
from gateway.records.sql.database import Database
from testing.gateway.rows import NOON, row


async def fill(database: Database) -> None:
    """Write ten admitted requests (even minutes) and ten refused ones (odd minutes), of two tenants."""
    await UsageWriter(database).write(
        row(
            f"req_{i:02}",
            created_at=NOON + timedelta(minutes=i),
            tenant_id=f"t{i % 4 // 2}",
            tenant=f"n{i % 4 // 2}",
            status="error" if i == 4 else "ok",
            error_code="engine_error" if i == 4 else None,
            latency_ms=100 * i,
            end_user="ann" if i == 6 else None,
            version=i or None,
        )
        for i in range(0, 20, 2)
    )
    log = RefusalLog(database, lambda _: None)
    limit = Exceeded(name="requests_per_minute", owner="tenant", value=1, needed=1, remaining=0)
    for i in range(1, 20, 2):
        log.note(
            RefusedRequest(
                request_id=f"req_{i:02}",
                at=NOON + timedelta(minutes=i),
                tenant_id=f"t{i % 4 // 2}",
                tenant=f"n{i % 4 // 2}",
                key_id="k",
                method="POST",
                route="/v1/completions",
                status=429,
                code="rate_limit_exceeded",
                latency_ms=1,
                exceeded=limit,
                end_user="ann" if i == 7 else None,
            )
        )
    await log.flush()


async def ids(log: RequestLog, limit: int = 100, **criteria: Any) -> list[int]:
    """Return the numbers of the entries of all pages."""
    found, after = [], None
    while True:
        page = await log.page(LogFilter(**criteria), after=after, limit=limit)
        found += [int(entry.request_id.removeprefix("req_")) for entry in page.entries]
        after = page.next
        if after is None:
            return found


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_pages_have_every_request_once_newest_first(database: Database, limit: int):
    await fill(database)
    log = RequestLog(database)
    assert await ids(log, limit) == list(range(19, -1, -1))
    assert await ids(log, limit, tenant="n1") == [19, 18, 15, 14, 11, 10, 7, 6, 3, 2]
    assert await ids(log, limit, tenant_id="t0", statuses=["ok"]) == [16, 12, 8, 0]


async def test_filters(database: Database):
    await fill(database)
    log = RequestLog(database)
    assert await ids(log, statuses=["error"]) == [4]
    assert await ids(log, code="engine_error") == [4]
    assert await ids(log, statuses=["not_admitted"], until=NOON + timedelta(minutes=4)) == [3, 1]
    assert await ids(log, since=NOON + timedelta(minutes=18)) == [19, 18]
    assert await ids(log, end_user="ann") == [7, 6]
    assert await ids(log, min_latency_ms=1600) == [18, 16]
    assert await ids(log, version=8) == [8]
    assert await ids(log, engine="http://e", limit=2) == list(range(18, -1, -2))
    assert await ids(log, engine="http://none") == []
    assert await ids(log, models=[]) == []


@pytest.mark.parametrize("scanned", [1, 3, 4])
async def test_a_search_goes_on_after_its_share_of_rows(database: Database, monkeypatch: Any, scanned: int):
    monkeypatch.setattr(request_log, "SCANNED", scanned)
    await fill(database)
    log = RequestLog(database)
    page = await log.page(LogFilter(end_user="ann"))
    assert page.entries == []
    assert page.next is not None
    assert await ids(log, end_user="ann") == [7, 6]
    assert await ids(log, 1, key_id="k") == list(range(19, -1, -1))
    of_n1 = [19, 18, 15, 14, 11, 10, 7, 6, 3, 2]
    assert await ids(log, 1, tenant="n1", key_id="k") == await ids(log, 2, tenant_id="t1", key_id="k") == of_n1
    assert await ids(log, tenant="n0", tenant_id="t1", key_id="k") == []
    bounds = {"since": NOON + timedelta(minutes=3), "until": NOON + timedelta(minutes=18)}
    for criteria in ({"tenant": "n1"}, {"tenant": "n1", "key_id": "k"}):
        assert await ids(log, 2, **criteria, **bounds) == of_n1[2:-1]


@pytest.mark.parametrize("criteria", [{}, {"tenant": "acme"}, {"tenant_id": "t1"}, {"tenant": "acme", "key_id": "k"}])
async def test_requests_of_one_moment_are_on_consecutive_pages(database: Database, criteria: dict[str, str]):
    await UsageWriter(database).write(row(f"req_{i:02}", created_at=NOON) for i in range(5))
    assert await ids(RequestLog(database), 2, **criteria) == [4, 3, 2, 1, 0]


async def test_a_request_is_found_by_its_id_and_its_answers(database: Database):
    await fill(database)
    log = RequestLog(database)
    admitted, refused = await log.find("chatcmpl-04"), await log.find("req_05")
    assert admitted is not None
    assert refused is not None
    assert (admitted.request_id, admitted.status, admitted.code, admitted.is_admitted) == (
        *("req_04", "error", "engine_error"),
        True,
    )
    assert (refused.http_status, refused.is_admitted) == (429, False)
    assert refused.limit == Exceeded(name="requests_per_minute", owner="tenant", value=1, needed=1, remaining=0)
    assert await log.find("cmpl-04", tenant_id="t1") is None
    assert await log.find("req_99") is None
    with pytest.raises(BadRequest, match=r"^id: expected"):
        await log.find("04\0")


@pytest.mark.parametrize("after", ["x", "WyIyMDI2", "bnVsbA", "WyIyMDI2LTAxLTAxVDEyOjAwOjAwIiwgImEiXQ"])
async def test_a_cursor_of_something_else_is_refused(database: Database, after: str):
    with pytest.raises(BadRequest, match=r"^after: expected"):
        await RequestLog(database).page(LogFilter(), after=after)
