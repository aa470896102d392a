"""The quota script on a real Valkey: all or nothing, on its clock, settled once."""

import asyncio
import math
import socket
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.admission.quota import Quota, Reservation, connect, format_duration
from gateway.errors import BadRequest, RateLimited, Unavailable
from gateway.records.tenants import Limits, Tenant


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    redis = connect(redis_url, timeout=2.0)
    yield redis
    await redis.aclose()


@pytest.fixture
def quota(redis: Redis) -> Quota:
    return Quota(redis, timeout=2.0, lease_seconds=30)


def tenant(**limits: int) -> Tenant:
    given = {"requests_per_minute": 10_000, "tokens_per_minute": 1_000_000, "max_concurrent": 1000} | limits
    return Tenant(id=uuid.uuid4().hex, name="t", limits=Limits(**given), created_at=datetime.now(UTC))


async def outcomes(
    quota: Quota, of: Tenant, count: int, tokens: int = 1
) -> tuple[list[Reservation], list[RateLimited]]:
    tasks = (quota.acquire(of, uuid.uuid4().hex, tokens) for _ in range(count))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    taken = [r for r in results if isinstance(r, Reservation)]
    refused = [r for r in results if isinstance(r, RateLimited)]
    assert len(taken) + len(refused) == count
    return taken, refused


@pytest.mark.parametrize(
    ("limits", "tokens", "limit"),
    [
        ({"requests_per_minute": 50}, 1, "requests"),
        ({"tokens_per_minute": 5000}, 100, "tokens"),
        ({"max_concurrent": 50}, 1, "concurrency"),
    ],
)
async def test_200_at_once_against_a_limit_of_50(limits: dict, tokens: int, limit: str, quota: Quota):
    # At 50 a minute a unit comes back every 1.2 s: the burst must be over before that.
    started = time.monotonic()
    taken, refused = await outcomes(quota, tenant(**limits), 200, tokens)
    assert time.monotonic() - started < 1.1
    assert len(taken) == 50
    assert {refusal.kind for refusal in refused} == {limit}
    assert all(refusal.status == 429 and refusal.code == "rate_limit_exceeded" for refusal in refused)


async def test_a_refusal_consumes_nothing(quota: Quota, redis: Redis):
    """Refused for tokens, a request takes neither a request nor a slot, and the other way round."""
    of = tenant(requests_per_minute=2, tokens_per_minute=100, max_concurrent=2)
    await quota.acquire(of, "a", 90)
    before = await dump(redis, of)
    for i in range(5):
        with pytest.raises(RateLimited) as refused:
            await quota.acquire(of, f"b{i}", 50)
        assert refused.value.kind == "tokens"
    assert await dump(redis, of) == before
    last = await quota.acquire(of, "c", 5)
    assert last.headers["x-ratelimit-remaining-requests"] == "0"


async def dump(redis: Redis, of: Tenant) -> dict[bytes, object]:
    keys = sorted(await redis.keys(f"loraplex:{{{of.id}}}:*"))
    return {k: await redis.zrange(k, 0, -1, withscores=True) if b"leases" in k else await redis.get(k) for k in keys}


async def test_the_bucket_refills_at_the_rate_of_the_limit(quota: Quota):
    """600 a minute is one every 100 ms; after a full burst, each wait of 100 ms is good for one more."""
    of = tenant(requests_per_minute=600)
    started = time.monotonic()
    taken, refused = await outcomes(quota, of, 700)
    # What came back while the burst ran, and not one more.
    assert 600 <= len(taken) <= 600 + (time.monotonic() - started) * 10 + 1
    wait = int(refused[-1].headers["retry-after-ms"])
    assert 0 < wait <= 100
    assert refused[-1].headers["Retry-After"] == "1"
    await asyncio.sleep(wait / 1000)
    await quota.acquire(of, "next", 1)
    with pytest.raises(RateLimited):
        await quota.acquire(of, "one too many", 1)
    with_gap = time.monotonic()
    await asyncio.sleep(0.35)
    taken, _ = await outcomes(quota, of, 20)
    assert 3 <= len(taken) <= math.ceil((time.monotonic() - with_gap) * 10) + 1


async def test_retry_after_is_true(quota: Quota):
    """One millisecond less than it says is too early, what it says is enough."""
    of = tenant(tokens_per_minute=6000)  # 10 ms a token
    await quota.acquire(of, "a", 6000)
    with pytest.raises(RateLimited) as refused:
        await quota.acquire(of, "b", 30)
    wait = int(refused.value.headers["retry-after-ms"])
    assert 250 < wait <= 300
    await asyncio.sleep(wait / 1000 - 0.1)
    with pytest.raises(RateLimited):
        await quota.acquire(of, "c", 30)
    await asyncio.sleep(0.1)
    await quota.acquire(of, "d", 30)
    with pytest.raises(RateLimited) as refused:
        await quota.acquire(of, "e", 6000)
    assert int(refused.value.headers["Retry-After"]) == math.ceil(int(refused.value.headers["retry-after-ms"]) / 1000)
    assert 59 <= int(refused.value.headers["Retry-After"]) <= 60


async def test_settling_gives_back_what_was_not_used_and_only_once(quota: Quota):
    of = tenant(tokens_per_minute=1000, max_concurrent=1)
    first = await quota.acquire(of, "a", 900)
    for _ in range(3):
        await quota.settle(first, 100)
    second = await quota.acquire(of, "b", 1)
    # 1000 - 100 - 1, and what came back in between (17 a second).
    assert 899 <= int(second.headers["x-ratelimit-remaining-tokens"]) <= 915


async def test_a_request_that_does_not_count_is_given_back_whole_and_once(quota: Quota, redis: Redis):
    of = tenant(requests_per_minute=3, tokens_per_minute=1000)
    await quota.settle(await quota.acquire(of, "a", 1), 1)
    refused = await quota.acquire(of, "b", 900)
    for _ in range(3):
        await quota.settle(refused, 0, counts=False)
    after = await quota.acquire(of, "c", 1)
    assert after.headers["x-ratelimit-remaining-requests"] == "1"
    assert int(after.headers["x-ratelimit-remaining-tokens"]) >= 998


async def test_settling_more_than_was_taken_is_owed(quota: Quota):
    of = tenant(tokens_per_minute=1000)
    await quota.settle(await quota.acquire(of, "a", 100), 1500)
    with pytest.raises(RateLimited) as refused:
        await quota.acquire(of, "b", 1)
    assert 29 <= int(refused.value.headers["Retry-After"]) <= 31


async def test_the_same_request_sent_twice_is_taken_once(quota: Quota):
    of = tenant(requests_per_minute=5, tokens_per_minute=1000)
    once, again = await quota.acquire(of, "a", 100), await quota.acquire(of, "a", 100)
    assert again.headers["x-ratelimit-remaining-requests"] == once.headers["x-ratelimit-remaining-requests"] == "4"


async def test_a_lease_that_nobody_extends_expires(redis: Redis):
    quota = Quota(redis, timeout=2.0, lease_seconds=0.3)
    of = tenant(max_concurrent=1)
    dead = await quota.acquire(of, "a", 1000)
    with pytest.raises(RateLimited):
        await quota.acquire(of, "b", 1)
    await asyncio.sleep(0.4)
    alive = await quota.acquire(of, "c", 1)
    # Its reservation is no longer there to give back.
    left = int(alive.headers["x-ratelimit-remaining-tokens"])
    await quota.settle(dead, 0)
    await quota.settle(alive, 1)
    after = await quota.acquire(of, "d", 1)
    assert left < 1_000_000
    assert int(after.headers["x-ratelimit-remaining-requests"]) >= 9_990


async def test_a_lease_that_is_kept_does_not_expire(redis: Redis):
    quota = Quota(redis, timeout=2.0, lease_seconds=0.3)
    keeper = asyncio.create_task(quota.keep_leases())
    of = tenant(max_concurrent=1)
    running = await quota.acquire(of, "a", 1)
    await asyncio.sleep(0.8)
    with pytest.raises(RateLimited):
        await quota.acquire(of, "b", 1)
    await quota.settle(running, 1)
    await quota.acquire(of, "c", 1)
    keeper.cancel()
    await asyncio.wait({keeper})


async def test_what_can_never_pass_is_said_at_once(quota: Quota):
    of = tenant(tokens_per_minute=100)
    with pytest.raises(BadRequest, match="never") as refused:
        await quota.acquire(of, "a", 101)
    assert refused.value.param == "max_tokens"
    await quota.acquire(of, "b", 100)


async def test_all_keys_of_a_tenant_share_a_hash_tag_and_expire(quota: Quota, redis: Redis):
    of = tenant()
    await quota.acquire(of, "a", 10)
    keys = [key async for key in redis.scan_iter(f"*{of.id}*")]
    assert len(keys) == 3
    for key in keys:
        assert f"{{{of.id}}}".encode() in key
        assert 0 < await redis.pttl(key) <= 60_000 + 1000


async def test_a_server_that_does_not_answer_is_given_up_in_time():
    """A socket that accepts and stays silent: worse than one that is closed."""
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    redis = connect(f"redis://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
    started = time.monotonic()
    with pytest.raises(Unavailable) as refused:
        await Quota(redis, timeout=0.3, lease_seconds=30).acquire(tenant(), "a", 1)
    assert refused.value.status == 503
    assert time.monotonic() - started < 1.0
    await redis.aclose()
    silent.close()


@given(st.integers(min_value=0, max_value=10**7))
def test_durations_read_back_as_what_was_written(milliseconds: int):
    written = format_duration(milliseconds)
    if written.endswith("ms"):
        assert int(written[:-2]) == milliseconds
    else:
        minutes, _, seconds = written.rstrip("s").rpartition("m")
        assert round((int(minutes or 0) * 60 + float(seconds)) * 1000) == milliseconds
