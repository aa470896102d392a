"""Ids of requests that another gateway than their own has settled: remembered for a day, and never restored."""

from collections.abc import Iterator

import pytest
import redis

from gateway.quota.leases import TOO_OLD
from tests.gateway.quota.scripted import DAY, SECOND, Script

LIMITS = ("tenant:c", 2, "tenant:b", 1000)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def abandon(script: Script, request_id: str) -> None:
    """Admit a request, let its lease end and settle it as another gateway."""
    assert script.call("acquire", request_id, 1000, 0, 10, 10, 10, 0, 1_000_000, "{}", *LIMITS)[0] == 2
    assert script.call("backfill", "tenant:b", 1000, script.now, 0, 0) == 1
    assert script.call("acquire", request_id, 1000, 0, 10, 10, 10, 0, 1_000_000, "{}", *LIMITS)[0] == 1
    script.now += 2 * SECOND
    assert [found[0] for found in script.call("expired", 10)] == [request_id.encode()]
    assert script.call("settle", request_id, 4, 4, 1, "{}", 1) is not None


def restore(script: Script, request_id: str, at: int) -> int | None:
    return script.call("restore", 1000, request_id, at, 10, 10, 10, 10, 0, "{}", *LIMITS)


def test_a_settled_request_is_never_restored_and_its_id_is_kept_for_a_day(client: redis.Redis):
    script = Script(client)
    admitted, abandoned = script.now, script.keys[4]
    abandon(script, "a")
    assert 0 < client.pttl(abandoned) <= DAY // 1000
    for later in (0, DAY - 60 * SECOND, 2 * DAY):
        script.now = admitted + 2 * SECOND + later
        assert restore(script, "a", admitted) is None
        assert client.zcard(script.keys[1]) == 0
    client.delete(script.keys[0])
    abandon(script, "b")
    # The first id has left the set, and its request is too old.
    assert client.zrange(abandoned, 0, -1) == [b"b"]
    assert restore(script, "a", admitted) == TOO_OLD
    assert client.zcard(script.keys[1]) == 0


def test_a_lost_lease_of_a_request_that_nobody_settled_is_restored_once(client: redis.Redis):
    script = Script(client)
    abandon(script, "a")
    assert restore(script, "b", script.now - SECOND) == 1
    assert restore(script, "b", script.now - SECOND) == 0
    assert client.zrange(script.keys[1], 0, -1) == [b"b"]
    assert client.zrange(script.keys[4], 0, -1) == [b"a"]
