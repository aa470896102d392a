"""Records of refused requests: rows stay within a tenant's limit, numbers are exact, and no request waits for them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select

from gateway.errors import Exceeded, Unavailable
from gateway.records.requests import refused as module
from gateway.records.requests.refusal_tables import refusal_counts, refused_requests
from gateway.records.requests.refused import ROWS_A_CODE, ROWS_A_MINUTE, RefusalLog, RefusedRequest
from gateway.records.sql.database import Database

NOON = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)


def refused(request_id: str, **changes: Any) -> RefusedRequest:
    values: dict[str, Any] = {
        "request_id": request_id,
        "at": NOON,
        "tenant_id": "t1",
        "tenant": "acme",
        "key_id": "k",
        "method": "POST",
        "route": "/v1/completions",
        "status": 404,
        "code": "model_not_found",
        "latency_ms": 3,
    }
    return RefusedRequest(**values | changes)


class Dropped:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int) -> None:
        self.number += number


async def rows(database: Database) -> list[Any]:
    async with database.read() as connection:
        return list((await connection.execute(select(refused_requests).order_by(refused_requests.c.request_id))).all())


async def numbers(database: Database) -> dict[tuple[int, str, str], int]:
    """Return the numbers by level, tenant and code."""
    table = refusal_counts
    async with database.read() as connection:
        found = await connection.execute(select(table.c.level, table.c.tenant_id, table.c.code, table.c.requests))
        return {(level, tenant, code): requests for level, tenant, code, requests in found}


async def test_a_refusal_is_kept_with_its_limit(database: Database):
    log = RefusalLog(database, Dropped())
    limit = Exceeded(name="tokens_per_minute", owner="key", value=100, needed=60, remaining=7)
    log.note(refused("a", status=429, code="rate_limit_exceeded", exceeded=limit, model="m", end_user="u"))
    await log.flush()
    [row] = await rows(database)
    assert (row.at, row.tenant, row.key_id, row.model, row.end_user) == (NOON, "acme", "k", "m", "u")
    assert (row.limit_name, row.limit_owner, row.limit_value) == ("tokens_per_minute", "key", 100)
    assert (row.needed, row.remaining) == (60, 7)


async def test_a_flood_of_one_tenant_is_counted_and_leaves_room_for_others(database: Database):
    dropped = Dropped()
    log = RefusalLog(database, dropped)
    for i in range(500):
        log.note(refused(f"flood{i}", code=f"c{i % 5}"))
    log.note(refused("other", tenant_id="t2", tenant="globex"))
    await log.flush()
    kept = [row.tenant for row in await rows(database)]
    assert (kept.count("acme"), kept.count("globex")) == (ROWS_A_MINUTE, 1)
    assert dropped.number == 500 - ROWS_A_MINUTE
    found = await numbers(database)
    assert all(found[level, "t1", f"c{i}"] == 100 for level in (60, 3600, 86400) for i in range(5))
    assert found[60, "t2", "model_not_found"] == 1
    # The next minute has room again, but one code gets only a part of it.
    for i in range(100):
        log.note(refused(f"later{i}", at=NOON + timedelta(minutes=1)))
    await log.flush()
    assert len(await rows(database)) == ROWS_A_MINUTE + 1 + ROWS_A_CODE
    assert (await numbers(database))[86400, "t1", "model_not_found"] == 100


async def test_requests_without_a_key_are_only_counted(database: Database):
    log = RefusalLog(database, Dropped())
    log.note(refused("a", tenant_id="", tenant="", key_id="", status=401, code="invalid_api_key"))
    await log.flush()
    assert await rows(database) == []
    assert (await numbers(database))[60, "", "invalid_api_key"] == 1


async def test_refusals_wait_while_the_database_is_away(database: Database, monkeypatch: Any):
    log = RefusalLog(database, Dropped())
    log.note(refused("a"))

    def away() -> Any:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(database, "write", away)
        await log.flush()
    log.note(refused("b"))
    await log.flush()
    assert [row.request_id for row in await rows(database)] == ["a", "b"]
    assert (await numbers(database))[3600, "t1", "model_not_found"] == 2


async def test_a_row_that_the_database_refuses_takes_no_other_with_it(database: Database):
    dropped = Dropped()
    log = RefusalLog(database, dropped)
    for name in "abcde":
        log.note(refused(name, **({"route": None} if name == "c" else {})))
    await log.flush()
    assert [row.request_id for row in await rows(database)] == ["a", "b", "d", "e"]
    assert dropped.number == 1


async def test_old_rows_and_a_tenants_excess_are_removed(database: Database, monkeypatch: Any):
    monkeypatch.setattr(module, "KEPT_ROWS", 3)
    log = RefusalLog(database, Dropped())
    log.note(refused("0", at=NOON - timedelta(days=31)))
    for i in range(1, 6):
        log.note(refused(f"{i}", at=NOON + timedelta(seconds=i)))
    log.note(refused("6", tenant_id="t2"))
    await log.flush()
    assert await log.prune(timedelta(days=30), NOON) == 3
    assert [row.request_id for row in await rows(database)] == ["3", "4", "5", "6"]
