"""Refusals that are only due to the reservations of running requests, which return their unused part at their end."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis as blocking

from gateway.errors import RateLimited
from gateway.quota.limits import Limit
from gateway.quota.quota import Quota
from gateway.records.money.prices import FREE, Price
from gateway.redis.client import Client
from gateway.redis.keys import quota_keys
from testing.gateway.principals import principal
from testing.gateway.quotas import settle, take
from testing.gateway.running import BASE_MODEL, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.quota.scripted import DAY, MS, SECOND, Script, Twin

PRICE = Price(output=1_000_000)
DAY_MS = DAY // MS


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[blocking.Redis]:
    with blocking.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(params=["script", "twin"])
def limits(request: pytest.FixtureRequest, client: blocking.Redis) -> Script | Twin:
    return Script(client) if request.param == "script" else Twin()


async def refused(quota: Quota, who: Any, tokens: int) -> RateLimited:
    with pytest.raises(RateLimited) as found:
        await take(quota, who, tokens, price=PRICE)
    return found.value


async def refusals(gateway: Gateway) -> dict[str, float]:
    """Return the numbers of refused requests by the metric's limit."""
    text = (await gateway.admin.get("/metrics")).body.decode()
    found = re.findall(r'loraplex_gateway_quota_refusals_total\{limit="(\w+)",tenant="acme"\} (\S+)', text)
    return {limit: float(number) for limit, number in found}


@pytest.mark.parametrize("budget", ["budget_per_day", "budget_per_week", "budget_per_month", "budget_per_30_days"])
@pytest.mark.parametrize(
    ("owner", "sharing"),
    [("tenant", "of all keys of this tenant"), ("key", "of this key"), ("model", "for this model")],
)
async def test_a_budget_that_is_only_reserved_is_not_used_up(budget: str, owner: str, sharing: str, quota: Quota):
    who = principal(**{owner: {budget: 1000}})
    running = [await take(quota, who, 400, price=PRICE) for _ in range(2)]
    error = await refused(quota, who, 300)
    assert (error.status, error.code, error.kind) == (429, "rate_limit_exceeded", "budget")
    assert error.headers["Retry-After"] == "1"
    assert f"budget of this {owner}, 0.001, has no room while other requests run: " in error.message
    assert f"0.0002 is left, and 0.0008 is reserved by running requests {sharing}, which return" in error.message
    assert error.message.endswith("Try again when one of them has ended.")
    # Half of it is used now, and the other half is still reserved.
    await settle(quota, running[0], 400, 400)
    assert (await refused(quota, who, 600)).code == "rate_limit_exceeded"
    error = await refused(quota, who, 601)
    assert error.code == "insufficient_quota"
    assert "Try again on " in error.message
    await settle(quota, running[1], 0, 0)
    await take(quota, who, 600, price=PRICE)


async def test_a_days_tokens_that_are_only_held_are_not_used_up(quota: Quota):
    who = principal(key={"tokens_per_day": 100_000})
    await settle(quota, await take(quota, who, 50_000), 50_000)
    await take(quota, who, 45_000)
    error = await refused(quota, who, 20_000)
    assert (error.code, error.kind, error.headers["Retry-After"]) == ("rate_limit_exceeded", "tokens", "1")
    assert "and 45000 are reserved by running requests of this key, which return" in error.message
    error = await refused(quota, who, 60_000)
    assert "reserved" not in error.message
    # The 10,000 that were used beyond the room come back in 2.4 hours.
    assert int(error.headers["Retry-After"]) == pytest.approx(0.1 * 86_400, abs=60)


# The tests' clock begins two seconds before midnight: of a Friday that is the last day but one of a month.
@pytest.mark.parametrize(("kind", "days"), [("j", 0), ("b", 1), ("w", 2)])
def test_money_that_was_reserved_before_a_period_is_not_reserved_in_it(limits: Script | Twin, kind: str, days: int):
    budget = [Limit(f"tenant:{kind}", "tenant", kind, 100)]
    limits.now += days * DAY
    assert limits.acquire("before", budget, 0, 80, 80, PRICE)[0]
    limits.now += 20 * SECOND
    assert limits.acquire("in it", budget, 0, 70, 70, PRICE)[0]
    [(remaining, wait, _, reserved)] = limits.acquire("a", budget, 0, 40, 40, PRICE)[2]
    assert (remaining, wait, reserved) == (30, 1000, 70)
    assert limits.settle("before", 80, 80, True)
    assert limits.settle("in it", 70, 70, True)
    [(remaining, wait, _, reserved)] = limits.acquire("a", budget, 0, 40, 40, PRICE)[2]
    assert (remaining, wait > 1000, reserved) == (30, True, 0)


def test_a_rolling_budget_waits_for_a_day_whose_money_is_used_and_not_for_reserved_money(limits: Script | Twin):
    budget = [Limit("tenant:l", "tenant", "l", 100)]
    assert limits.acquire("spent", budget, 0, 90, 90, PRICE)[0]
    assert limits.settle("spent", 90, 90, True)
    limits.now += 29 * DAY
    assert limits.acquire("runs", budget, 0, 10, 10, PRICE)[0]
    # The first day leaves in two seconds, and the last one in 30 days.
    assert limits.acquire("a", budget, 0, 95, 95, PRICE)[2] == [(0, 2000, 29 * DAY_MS + 2000, 10)]


def test_a_rate_that_running_requests_hold_waits_at_least_until_its_debt_leaves_room(limits: Script | Twin):
    rate = [Limit("tenant:t", "tenant", "t", 60_000)]
    assert limits.acquire("used", rate, 0, 40_000, 40_000, FREE)[0]
    assert limits.settle("used", 40_000, 0, True)
    assert limits.acquire("runs", rate, 0, 20_000, 20_000, FREE)[0]
    # 20,000 tokens come back in 20 s, but 10,000 of the room that is needed are held: time alone does not free them.
    assert limits.acquire("a", rate, 0, 50_000, 50_000, FREE)[2] == [(0, 30_000, 60_000, 20_000)]
    # Here it does, and no running request needs to end.
    assert limits.acquire("b", rate, 0, 15_000, 15_000, FREE)[2] == [(0, 15_000, 60_000, 20_000)]
    # The debt leaves room for it.
    limits.now += 40 * SECOND
    assert limits.acquire("c", rate, 0, 45_000, 45_000, FREE)[2] == [(40_000, 1000, 20_000, 20_000)]


def test_reserved_money_is_summed_again_from_the_running_requests(client: blocking.Redis):
    """After Redis has lost it, and for a lease that it has lost and that its gateway restores."""
    script, budget = Script(client), [Limit("tenant:b", "tenant", "b", 100)]
    for name in ("first", "second"):
        assert script.acquire(name, budget, 0, 40, 40, PRICE)[0]
    state, leases, held, *_ = script.keys
    client.hset(state, "tenant:b#", 1)
    script.call("extend", 10**9)
    assert script.acquire("a", budget, 0, 100, 100, PRICE)[2][0][3] == 80
    client.zrem(leases, "second")
    client.hdel(held, "second")
    script.now += 60 * SECOND
    assert script.call("extend", 10**9, "second", "", "") == [b"second"]
    assert script.acquire("a", budget, 0, 100, 100, PRICE)[2][0][3] == 40
    lease = ("restore", 10**9, "second", script.now - 60 * SECOND, 40, 40, 40, 0, 0, "{}", "tenant:b", 100)
    assert script.call(*lease) == 1
    assert script.acquire("a", budget, 0, 100, 100, PRICE)[2][0][3] == 80
    for name in ("first", "second"):
        assert script.settle(name, 0, 0, True)
    assert not client.hexists(state, "tenant:b#")


async def test_money_of_requests_from_before_a_backfill_is_not_reserved(quota: Quota, redis: Client):
    """Their costs reach the new state through the ledger."""
    who = principal(tenant={"budget_per_day": 1000})
    running = await take(quota, who, 900, price=PRICE)
    await redis.hdel(quota_keys(who.tenant.id)[0], "tenant:j")
    second = await take(quota, who, 700, price=PRICE)
    assert "and 0.0007 is reserved" in (await refused(quota, who, 400)).message
    await settle(quota, running, 900, 900)
    assert "and 0.0007 is reserved" in (await refused(quota, who, 400)).message
    await settle(quota, second, 700, 700)
    assert (await refused(quota, who, 400)).code == "insufficient_quota"


async def test_a_client_gets_a_429_that_it_may_repeat_while_a_stream_reserves_the_budget(
    gateway: Gateway, upstream: Upstream
):
    path = f"/admin/api/prices/{BASE_MODEL}"
    assert (await gateway.admin.call("PUT", path, json={"input": 0, "output": 1_000_000})).status == 200
    acme = await gateway.tenant("acme", budget_per_day=250, budget_per_month=10_000)
    upstream.paused = True
    stream = asyncio.create_task(acme.chat(stream=True, max_tokens=200, x_engine={"tokens": 30, "pause": True}))
    await until(lambda: asyncio.sleep(0, len(upstream.requests) == 1))
    got = await acme.chat(max_tokens=100, x_engine={"tokens": 100})
    assert (got.status, got.error["code"], got.error["type"]) == (429, "rate_limit_exceeded", "budget")
    assert (got.headers["Retry-After"], got.headers["retry-after-ms"]) == ("1", "1000")
    assert "0.0002 USD is reserved by running requests of all keys of this tenant" in got.error["message"]
    assert await refusals(gateway) == {"reserved_budget": 1.0}
    upstream.paused = False
    assert (await stream).status == 200
    assert (await acme.chat(max_tokens=100, x_engine={"tokens": 100})).status == 200
    got = await acme.chat(max_tokens=200)
    assert (got.status, got.error["code"]) == (429, "insufficient_quota")
    assert "Try again on" in got.error["message"]
    # The alert BudgetExhausted and the event `budget.exhausted` are about these only.
    assert await refusals(gateway) == {"reserved_budget": 1.0, "budget": 1.0}
