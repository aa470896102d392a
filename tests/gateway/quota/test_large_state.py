"""The state of a tenant that made and ended many keys with limits: other tenants do not wait for it."""

from collections.abc import Iterator

import pytest
import redis

from gateway.quota.limits import Limit
from gateway.records.money.prices import FREE
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
