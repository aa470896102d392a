"""A peek at the limits: it changes nothing, and sees what the next reservation sees."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.errors import Unavailable
from gateway.limits.kinds import BACKFILLED, TOKEN_RATE
from gateway.quota.limits import Limit
from gateway.quota.local import LocalLimits
from gateway.quota.quota import Quota
from gateway.records.money.prices import Price
from gateway.records.past_usage import ALL, UsagePart
from gateway.redis.client import Client
from testing.gateway.principals import principal
from testing.gateway.quotas import dump, settle, take
from testing.gateway.running import until
from tests.gateway.quota.scripted import DAY, SECOND, Script, demand
from tests.gateway.quota.test_quota_arithmetic import changes, grows, limit_sets, prices, settles, takes, values


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def stored(client: redis.Redis, script: Script) -> list[Any]:
    """Return all data of the script's tenant, and its expiries. DUMP would not do: the order in a hash table may change
    while nobody writes.
    """
    quota, leases, held, usage, *_ = script.keys
    found = [client.hgetall(quota), client.zrange(leases, 0, -1, withscores=True), client.hgetall(held)]
    return [*found, client.xrange(usage), *map(client.pexpiretime, script.keys)]


class Peeked:
    """The script and its twin, which get the same calls. Each peek is checked for writing nothing."""

    def __init__(self, client: redis.Redis) -> None:
        self.client, self.script, self.twin = client, Script(client), LocalLimits()
        self.held: list[tuple[str, int, int]] = []

    def peek(self, limits: list[Limit]) -> list[tuple[int, int]]:
        before = stored(self.client, self.script)
        found = self.script.peek(limits)
        assert stored(self.client, self.script) == before
        kept = dict(self.twin._states)
        assert self.twin.peek("", limits, self.script.now) == [(remaining, reset) for remaining, reset, _ in found]
        assert self.twin._states == kept
        return [(remaining, reset) for remaining, reset, _ in found]

    def take(self, request_id: str, limits: list[Limit], price: Price, prompt: int, completion: int, held: int) -> None:
        """Reserve a request, and compare its answer with the peek before it."""
        step = max(1, completion)
        left = self.peek(limits)
        asked = demand(request_id, prompt, completion, step, price, held)
        answer = self.twin.acquire(limits, asked, self.script.now)
        assert self.script.acquire(request_id, limits, prompt, completion, step, price, held)[0] == answer.allowed
        tokens = prompt + answer.granted
        cost = price.highest_cost(prompt, answer.granted)
        for limit, (remaining, reset), (rest, _, reset_then, _) in zip(limits, left, answer.states, strict=True):
            at_first = prompt + min(held, answer.granted) if limit.letter in TOKEN_RATE else limit.amount(tokens, cost)
            assert rest == remaining - (at_first if answer.allowed else 0)
            assert reset_then >= reset
        if answer.allowed:
            self.held.append((request_id, tokens, cost))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limits=limit_sets, price=prices, steps=st.lists(st.one_of(takes, settles, grows, changes), min_size=1, max_size=20)
)
def test_a_peek_changes_nothing_and_sees_what_a_reservation_sees(
    client: redis.Redis, limits: list[Limit], price: Price, steps: list
):
    both = Peeked(client)
    for number, (action, wait, *rest) in enumerate(steps):
        both.script.now += wait
        if action == "take":
            prompt, completion, _, part = rest
            both.take(f"r{number}", limits, price, prompt, completion, int(completion * part))
        elif action == "change":
            index, value = rest
            changed = limits[index % len(limits)]
            limits = [msgspec.structs.replace(each, value=value) if each is changed else each for each in limits]
        elif both.held:
            index, part, other, *_ = rest
            request_id, tokens, cost = both.held[index % len(both.held)]
            used = int(tokens * part)
            if action == "grow":
                both.twin.grow("", request_id, used, int(tokens * other), 0, both.script.now)
                both.script.grow(request_id, used, int(tokens * other))
            else:
                both.twin.settle("", request_id, used, int(cost * part), counts=other, now=both.script.now)
                both.script.settle(request_id, used, int(cost * part), other)
        both.peek(limits)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limits=limit_sets, value=values)
def test_a_peek_before_any_request_writes_nothing(client: redis.Redis, limits: list[Limit], value: int):
    """Limits that the ledger also counts name the moment up to which their usage must be read there."""
    script = Script(client)
    found = script.peek(limits)
    assert stored(client, script) == [{}, [], {}, [], -2, -2, -2, -2, -2]
    assert [since for _, _, since in found] == [script.now if limit.letter in BACKFILLED else 0 for limit in limits]
    assert [remaining for remaining, _, _ in found] == [limit.value for limit in limits]


def test_the_slots_of_ended_leases_are_free_in_a_peek(client: redis.Redis):
    script, limits = Script(client), [Limit("tenant:c", "tenant", "c", 2), Limit("tenant:o", "tenant", "o", 100)]
    script.call("acquire", "r", 1000, 0, 10, 10, 10, 0, 0, "{}", "tenant:c", 2, "tenant:o", 100)
    assert script.peek(limits) == [(1, 0, 0), (90, 0, 0)]
    script.now += 2 * SECOND
    before = stored(client, script)
    assert script.peek(limits) == [(2, 0, 0), (100, 0, 0)]
    assert stored(client, script) == before


class Ledger:
    """Sums of a ledger: a cost of 30 in the month, and 600 tokens an hour ago."""

    async def cost(self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL) -> int:
        return 30

    async def by_hour(
        self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL, *, tokens: bool = True
    ) -> Sequence[tuple[datetime, int]]:
        return [(until.replace(minute=0, second=0, microsecond=0), 600 if tokens else 3)]


class LateLedger(Ledger):
    """A ledger that a further cost of 20 reaches after its first sum. sums: the number of sums."""

    sums = 0

    async def cost(self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL) -> int:
        self.sums += 1
        return 30 if self.sums == 1 else 50


async def test_usage_that_reached_the_ledger_late_is_seen_without_a_further_request(redis: Client):
    """It is of a request that ran while Redis lost its data."""
    ledger = LateLedger()
    quota = Quota(redis, timeout=30.0, lease_seconds=30, past=ledger)
    who = principal(tenant={"budget_per_month": 100})
    await settle(quota, await take(quota, who, 100, price=Price(output=10**5)), 100, 10)

    async def is_seen() -> bool:
        return [each.used for each in await quota.peek(who)] == [60]

    await until(is_seen)
    # A repetition is due when the age of the first sum has doubled, not with each look.
    for _ in range(100):
        assert await is_seen()
    assert ledger.sums < 12
    await quota.close()


@pytest.mark.usefixtures("stopped_clock")
async def test_usage_that_redis_does_not_know_is_read_from_the_ledger_and_not_stored(redis: Client):
    quota = Quota(redis, timeout=30.0, lease_seconds=30, past=Ledger())
    who = principal(
        tenant={"budget_per_month": 100, "tokens_per_day": 1000, "requests_per_minute": 5}, key={"requests_per_day": 9}
    )
    left = {f"{each.limit.owner} {each.limit.name}": each for each in await quota.peek(who)}
    assert {name: each.remaining for name, each in left.items()} == {
        "tenant budget_per_month": 70,
        "tenant tokens_per_day": 400,
        "tenant requests_per_minute": 5,
        "key requests_per_day": 6,
    }
    assert left["tenant budget_per_month"].used == 30
    # 600 of 1,000 tokens a day are free again after 0.6 days.
    assert abs(left["tenant tokens_per_day"].reset - 0.6 * DAY / 1000) < 1000
    assert await dump(redis, who) == {}
    await settle(quota, await take(quota, who, 100, price=Price(output=10**5)), 100, 10)
    left = {each.limit.name: each for each in await quota.peek(who)}
    assert [left[name].remaining for name in ("budget_per_month", "tokens_per_day", "requests_per_day")] == [60, 300, 5]
    assert left["requests_per_minute"].remaining == 4
    await quota.close()


async def test_a_peek_after_a_restart_of_redis_sees_what_running_requests_hold(redis: Client):
    quota = Quota(redis, timeout=30.0, lease_seconds=600, past=Ledger())
    who = principal(
        tenant={"tokens_per_day": 1000, "requests_per_day": 9, "tokens_per_minute": 500, "budget_per_month": 100}
    )
    running = await take(quota, who, 100)
    # Another server wrote the states, by their run id.
    await redis.hset(f"loraplex:{{{who.tenant.id}}}:quota", "@", f"{'0' * 40} 0")
    kept = await dump(redis, who)
    left = {each.limit.name: each.remaining for each in await quota.peek(who)}
    assert left == {"tokens_per_day": 300, "requests_per_day": 6, "tokens_per_minute": 400, "budget_per_month": 70}
    assert await dump(redis, who) == kept
    await settle(quota, running, 100)
    await quota.close()


async def test_a_peek_without_redis_is_refused(redis: Client, monkeypatch: pytest.MonkeyPatch):
    quota = Quota(redis, timeout=30.0, lease_seconds=30)
    who = principal(tenant={"requests_per_minute": 5})

    async def away(*_: Any) -> Any:
        raise Unavailable("away")

    monkeypatch.setattr(quota._store, "script", away)
    with pytest.raises(Unavailable):
        await quota.peek(who)
