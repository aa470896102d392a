"""Usage rows in SQL: each once, with its sums, on both databases, from several concurrent writers."""

import asyncio
import json
from base64 import urlsafe_b64encode
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from gateway.billing.writer import UsageWriter
from gateway.errors import BadRequest
from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage, usage_daily, usage_hourly, usage_rejected
from gateway.records.tenants.tenants import Tenants
from gateway.records.usage import end_user_sums
from gateway.records.usage.report import SUMMED, UsageReport, UsageSums
from gateway.usage_row import decode, encode
from testing.gateway.rows import NOON, row


async def totals(database: Database) -> list[tuple[int, ...]]:
    """Return requests, tokens and cost by the rows, the hours and the days; the three must be equal."""
    found = []
    async with database.read() as connection:
        for table in (usage, usage_hourly, usage_daily):
            requests = func.count() if table is usage else func.sum(table.c.requests)
            query = select(requests, *(func.sum(table.c[name]) for name in SUMMED[1:]))
            found.append(tuple(int(value or 0) for value in (await connection.execute(query)).one()))
    return found


async def test_every_row_once_whatever_is_sent_twice(database: Database):
    writer = UsageWriter(database)
    for start in range(0, 1000, 200):
        await writer.write([row(f"r{i % 700}") for i in range(start, start + 300)])
    assert await totals(database) == [(700, 2100, 3500, 700, 4900)] * 3


async def test_a_row_comes_back_as_it_was(database: Database):
    moment = NOON + timedelta(microseconds=7)
    given = row("r", ttft_ms=4, adapter_digest="d" * 64, finish_reason=None, created_at=moment)
    assert decode(encode(given)) == given
    await UsageWriter(database).write_events([encode(given)])
    assert await UsageReport(database).recent() == [given]


async def test_two_writers_of_the_same_rows_neither_deadlock_nor_count_twice(migrated_postgres_url: str):
    """Two writers write the same tenants' rows, each in its own order, in batches that overlap."""
    databases = [Database(migrated_postgres_url) for _ in range(2)]
    rows = [row(f"r{i:04}", tenant_id=f"t{i % 7}", model=f"m{i % 5}", key_id=f"k{i % 3}") for i in range(1200)]

    async def write(database: Database, step: int) -> None:
        writer = UsageWriter(database)
        for start in range(0, len(rows), 40):
            await writer.write([rows[(start + i) * step % len(rows)] for i in range(80)])

    # A deadlock would raise an error: PostgreSQL ends one of the two.
    await asyncio.gather(*(write(database, step) for database in databases for step in (1, 7, 1199)))
    assert await totals(databases[0]) == [(1200, 3600, 6000, 1200, 8400)] * 3
    for database in databases:
        await database.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": None},
        {"model": "m\0"},
        {"model": "m" * 300},
        {"prompt_tokens": 2**70},
    ],
    ids=str,
)
async def test_what_the_database_refuses_is_set_aside_and_takes_no_other_with_it(
    database: Database, wrong: dict[str, Any]
):
    if database.dialect == "sqlite" and "model" in wrong:
        pytest.skip("SQLite takes any text")
    writer = UsageWriter(database)
    rows = [row(f"r{i}", **(wrong if i == 4 else {})) for i in range(9)]
    await writer.write(rows)
    await writer.write(rows)
    assert [found[0] for found in await totals(database)] == [8, 8, 8]
    async with database.read() as connection:
        [set_aside] = (await connection.execute(select(usage_rejected))).all()
    assert '"request_id":"r4"' in set_aside.event
    assert set_aside.reason
    assert writer.rejected > 0


async def test_what_is_no_usage_row_is_set_aside(database: Database, caplog: pytest.LogCaptureFixture):
    writer = UsageWriter(database)
    await writer.write_events([b"", b"\xff\0{", b'{"request_id": 1}', encode(row("good")), encode(row("r"))[:-9]])
    assert (await totals(database))[0][0] == 1
    async with database.read() as connection:
        found = (await connection.execute(select(usage_rejected.c.reason))).scalars().all()
    assert len(found) == 4
    assert all(reason.startswith("not a usage row: ") for reason in found)
    assert "usage_rejected" in caplog.text


async def test_sums_of_any_time_are_those_of_the_rows(database: Database):
    """Sums equal the rows, at uneven moments of five days, for bounds on, before and after hours and days, or open."""
    rows = [
        row(
            f"r{i}",
            model="ab"[i % 2],
            key_id=f"k{i % 3}",
            tenant_id=f"t{i % 2}",
            tenant=f"name{i % 2}",
            completion_tokens=i,
            created_at=NOON + timedelta(minutes=17 * i, microseconds=i),
        )
        for i in range(400)
    ]
    await UsageWriter(database).write(rows)
    report = UsageReport(database)
    day = NOON.replace(hour=0)
    ends = [
        NOON,
        NOON + timedelta(seconds=1),
        NOON + timedelta(minutes=17, microseconds=1),
        NOON + timedelta(minutes=59),
        NOON + timedelta(hours=1),
        day + timedelta(days=1, minutes=-30),
        day + timedelta(days=1),
        day + timedelta(days=1, minutes=30),
        day + timedelta(days=2, hours=23, minutes=59, seconds=59),
        day + timedelta(days=3),
        day + timedelta(days=4, hours=5),
    ]
    for since in [None, *ends]:
        for until in [None, *ends]:
            expected: dict[str, list[int]] = {}
            for r in rows:
                if (since is None or r.created_at >= since) and (until is None or r.created_at < until):
                    sums = expected.setdefault(r.tenant, [0, 0])
                    sums[0] += 1
                    sums[1] += r.completion_tokens
            found = await report.sums([], since=since, until=until)
            assert {s.tenant: [s.requests, s.completion_tokens] for s in found} == expected, (since, until)


async def test_sums_are_told_apart_by_model_key_and_day(database: Database):
    rows = [
        row(f"r{i}", model="ab"[i % 2], key_id=f"k{i // 4}", created_at=NOON + timedelta(hours=9 * i)) for i in range(8)
    ]
    await UsageWriter(database).write(rows)
    report = UsageReport(database)
    assert [(s.model, s.requests) for s in await report.sums()] == [("a", 4), ("b", 4)]
    assert [(s.key_id, s.model, s.requests) for s in await report.sums(["key"])] == [("k0", None, 4), ("k1", None, 4)]
    by_day = await report.sums(["day"], since=NOON + timedelta(minutes=1), until=NOON + timedelta(hours=50))
    assert [(s.day and s.day.day, s.requests) for s in by_day] == [(1, 1), (2, 2), (3, 2)]
    assert len(await report.sums(["day", "model", "key"])) == 7
    # No tenant of these rows exists, but the name is known.
    assert [s.deleted for s in await report.sums([], tenant="acme")] == [True]
    assert await report.sums(tenant="other") == []
    assert await report.sums(tenant_id="t2") == []
    assert (await report.knows("acme"), await report.knows("other")) == (True, False)


@pytest.mark.parametrize("groups", [["model"], ["key"], ["day", "model", "key"], []])
@pytest.mark.parametrize("from_rows", [False, True])
async def test_pages_are_the_whole_report(groups: list[str], from_rows: bool, database: Database):
    """Each group is on one page, in order, and every page has the total of all; a name's two tenants are two groups."""
    name = "two-lives"
    ids = ["gone", (await Tenants(database).create(name, {}, "op")).id]
    rows = [
        row(
            f"r{i}",
            model=f"m{i % 11}",
            key_id=f"k{i % 3}",
            tenant=name if i % 2 else f"t{i % 5}",
            tenant_id=ids[i // 2 % 2] if i % 2 else f"id{i % 5}",
            created_at=NOON + timedelta(hours=7 * i),
        )
        for i in range(60)
    ]
    await UsageWriter(database).write(rows)
    report = UsageReport(database)
    times = {"since": NOON + timedelta(minutes=1), "until": NOON + timedelta(hours=300, minutes=1)} if from_rows else {}
    whole = await report.page(groups, **times)
    assert whole.next is None
    assert [whole.total[field] for field in SUMMED] == [
        sum(getattr(g, field) for g in whole.groups) for field in SUMMED
    ]
    assert {group.deleted for group in whole.groups if group.tenant == name} == {False, True}
    for limit in (1, 7, len(whole.groups)):
        found: list[UsageSums] = []
        after = None
        while True:
            page = await report.page(groups, **times, after=after, limit=limit)
            assert page.total == whole.total
            assert len(page.groups) <= limit
            found += page.groups
            after = page.next
            if after is None:
                break
        assert found == whole.groups
    assert (await report.page(groups, models=["m1"], **times)).total["requests"] < whole.total["requests"]


async def test_usage_by_version(database: Database, monkeypatch: pytest.MonkeyPatch):
    """Group rows by version over days, page by page. The base model and mixtures have none."""
    given = [("a", 1, 0), ("a", 2, 0), ("a", 2, 30), ("a*0.5", None, 0), ("b", 1, 0), ("base", None, 0)]
    rows = [
        row(f"r{number}", model=model, version=version, created_at=NOON + timedelta(hours=hours))
        for number, (model, version, hours) in enumerate(given)
    ]
    await UsageWriter(database).write([*rows, row("late", model="a", version=1, created_at=NOON + timedelta(days=9))])
    report, period = UsageReport(database), {"since": NOON, "until": NOON + timedelta(days=9)}
    expected = [("a", 1, 1), ("a", 2, 2), ("a*0.5", None, 1), ("b", 1, 1), ("base", None, 1)]
    found, after = [], None
    for _ in range(5):
        page = await report.page(["version"], **period, limit=1, after=after)
        assert page.total["requests"] == 6
        found += [(sums.model, sums.version, sums.requests) for sums in page.groups]
        after = page.next
    assert (found, after) == (expected, None)
    by_day = await report.sums(["version", "day"], **period, models=["a"])
    start = NOON.replace(hour=0)
    assert [(sums.day, sums.version) for sums in by_day] == [(start, 1), (start, 2), (start + timedelta(days=1), 2)]
    for since, until in ((None, NOON), (NOON, NOON + timedelta(days=32)), (NOON, None)):
        with pytest.raises(BadRequest, match="31 days"):
            await report.page(["version"], since=since, until=until)
    # A version in a cursor may not exceed the database's integers.
    huge = urlsafe_b64encode(json.dumps(["acme", "a", 2**70, False]).encode()).decode().rstrip("=")
    with pytest.raises(BadRequest, match="after"):
        await report.page(["version"], **period, after=huge)
    # A tenant's own report does not read any number of rows.
    own = {"tenant_id": rows[0].tenant_id, **period}
    monkeypatch.setattr(end_user_sums, "MAX_ROWS", 6)
    assert (await report.page(["version"], **own)).total["requests"] == 6
    monkeypatch.setattr(end_user_sums, "MAX_ROWS", 5)
    with pytest.raises(BadRequest, match="at most 5 requests"):
        await report.page(["version"], **own)
