"""The state of a tenant that made and ended many keys with limits: other tenants do not wait for it."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
import redis

from gateway.quota.limits import Limit
from gateway.quota.quota import Quota
from gateway.quota.usage_backfill import UNKNOWN
from gateway.records.money.prices import FREE
from gateway.redis.client import connect
from testing.gateway.principals import principal
from testing.gateway.quotas import settle, take
from tests.gateway.quota.scripted import SECOND, Script

KEYS = 10_000
STALE = [f"key:{number}:t#" for number in range(50)]
SLOTS = Limit("tenant:c", "tenant", "c", 2)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client
        client.flushdb()


@pytest.fixture
def large(client: redis.Redis) -> Script:
    """Return a script with the limits of KEYS ended keys, six each, and counts of tokens that no request holds."""
    script = Script(client)
    limits = [Limit(f"key:one:{letter}", "key", letter, 10**6) for letter in "dqjwbl"]
    assert script.acquire("a", limits, 1, 1, 1, FREE)[0]
    assert script.settle("a", 2, 0, True)
    state = {name: value for name, value in client.hgetall(script.keys[0]).items() if name.startswith(b"key:")}
    assert len(state) == len(limits)
    for number in range(KEYS):
        client.hset(script.keys[0], mapping={b"%d " % number + name: value for name, value in state.items()})
    client.hset(script.keys[0], mapping=dict.fromkeys(STALE, "7"))
    return script


def test_counts_of_a_large_state_are_compared_in_parts(client: redis.Redis, large: Script):
    assert large.acquire("live", [SLOTS], 1, 1, 1, FREE)[0]
    calls = 0
    while any(client.hmget(large.keys[0], STALE)):
        large.now += 16 * SECOND
        assert large.call("extend", 10**9, "live", "", "") == []
        calls += 1
        assert calls < 30
    assert calls >= 6 * KEYS // 5000 // 2, "the state is read in several parts"
    assert client.hget(large.keys[0], "tenant:c") == b"1"


def test_slots_of_a_large_state_that_no_request_holds_are_free_after_one_refusal(client: redis.Redis, large: Script):
    client.hset(large.keys[0], "tenant:c", "2")
    assert not large.acquire("first", [SLOTS], 1, 1, 1, FREE)[0]
    assert large.acquire("second", [SLOTS], 1, 1, 1, FREE)[0]


def calls_until_dropped(large: Script, client: redis.Redis, limits: list[Limit]) -> list[int]:
    """Repeat a request until another server's states are dropped. Return the number of fields after each call."""
    counts = [client.hlen(large.keys[0])]
    flat = [item for limit in limits for item in (limit.field, limit.value)]
    while large.call("acquire", "new", 10**9, 1, 1, 1, 1, 0, 0, "{}", *flat) == [UNKNOWN]:
        counts.append(client.hlen(large.keys[0]))
        assert len(counts) < 100
        # A call within the pause drops nothing.
        assert large.call("acquire", "new", 10**9, 1, 1, 1, 1, 0, 0, "{}", *flat) == [UNKNOWN]
        assert client.hlen(large.keys[0]) == counts[-1]
        large.now += 30_000
    return [*counts, client.hlen(large.keys[0])]


def test_another_servers_states_are_dropped_in_parts_and_admit_nothing_before(client: redis.Redis, large: Script):
    state, spent = large.keys[0], Limit("tenant:b", "tenant", "b", 10**6)
    assert large.acquire("before", [spent], 1, 1, 1, FREE)[0]
    assert large.settle("before", 2, 999, True)
    client.hset(state, mapping={"@": "0123abcd 0", "key:late:b?": "1", "key:one:r": b"\0" * 24})
    large.now += 6 * SECOND
    assert [left for left, _, since in large.peek([spent]) if since] == [10**6], "its usage counts as unknown"
    counts = calls_until_dropped(large, client, [spent])
    assert len(counts) > 6 * KEYS // 5000 // 2, "the state is dropped in several parts"
    assert max(before - after for before, after in itertools.pairwise(counts)) < 3000
    left = {name.decode() for name in client.hkeys(state)}
    assert {name for name in left if name[-1] in "dqjwbl?"} == {"tenant:b?"}, "only the new backfill waits"
    assert {"key:one:r", *STALE} <= left
    assert "<" not in left
    assert large.acquire("after", [spent], 1, 1, 1, FREE)[0]
    # The next comparison drops nothing.
    large.now += 6 * SECOND
    assert large.acquire("later", [spent], 1, 1, 1, FREE)[0]
    assert client.hexists(state, "tenant:b")


def test_a_drop_begins_again_if_the_server_changes_meanwhile(client: redis.Redis, large: Script):
    state, spent = large.keys[0], Limit("tenant:b", "tenant", "b", 10**6)
    # A cursor of a third server, which would skip most of the state here.
    client.hset(state, mapping={"@": "0123abcd 0", "<": f"4567cdef {2**20 - 1} 0"})
    counts = calls_until_dropped(large, client, [spent])
    assert counts[-1] < 200


async def test_a_request_waits_until_another_servers_states_are_dropped(client: redis.Redis, redis_url: str):
    async with connect(redis_url, timeout=30.0) as connection:
        quota = Quota(connection, timeout=30.0, lease_seconds=30)
        who = principal(tenant={"budget_per_month": 10**6})
        await settle(quota, await take(quota, who), 1)
        state = f"loraplex:{{{who.tenant.id}}}:quota"
        stale = {f"key:{number}:b": b"\0" * 40 for number in range(30_000)}
        client.hset(state, mapping={**stale, "@": "0123abcd 0"})
        taken = await asyncio.gather(*(take(quota, who) for _ in range(20)))
        assert client.hlen(state) < 10
        assert len({each.request_id for each in taken}) == 20
        await quota.close()
