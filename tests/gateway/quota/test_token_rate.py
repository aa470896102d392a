"""A rate's guarantee, `limit * (1 + t / window)`, for the tokens really used.

Tested against a leaky bucket fed with real use, for the script on a real Valkey and for its twin in Python.
"""

import random
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.quota.limits import Limit
from gateway.records.money.prices import FREE
from tests.gateway.quota.scripted import DAY, SECOND, Bucket, Script, Twin


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


waits = st.one_of(st.integers(0, SECOND), st.integers(0, 90 * SECOND), st.integers(0, 2 * DAY))
clock_steps = st.integers(-3600 * SECOND, -1)
parts = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))
begins = st.tuples(st.just("begin"), waits, parts, st.booleans(), parts)
# Streams that use their hold and request more at once.
grows = st.tuples(st.just("grow"), st.integers(0, 5 * SECOND), st.integers(0, 3), parts, parts)
uses = st.tuples(st.just("use"), waits, st.integers(0, 9), st.floats(0, 1))
ends = st.tuples(st.just("end"), waits, st.integers(0, 9), st.floats(0, 1))
sets = st.tuples(st.just("set back"), clock_steps)


@pytest.mark.parametrize("made", ["script", "twin"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from("td"),
    value=st.one_of(st.integers(1, 100), st.integers(1000, 10**7)),
    steps=st.lists(st.one_of(begins, begins, uses, grows, grows, grows, ends, sets), min_size=2, max_size=40),
)
def test_tokens_really_used_stay_within_the_promise(
    client: redis.Redis, made: str, kind: str, value: int, steps: list[Any]
):
    """Requests use any part of their hold, at any moments until their end, and grow it; clocks are set back.

    A growth of nothing is the lease's extension.
    """
    limits = Script(client) if made == "script" else Twin()
    limit = Limit(f"tenant:{kind}", "tenant", kind, value)
    bucket, elapsed = Bucket(limit), 0
    # Request -> (total tokens that it may use, tokens used so far).
    running: dict[str, tuple[int, int]] = {}
    for number, (action, moment, *rest) in enumerate(steps):
        limits.now += moment
        elapsed += max(0, moment)
        if action == "begin":
            part, shorten, expected = rest
            tokens = max(1, int(value * part))
            step, expects = 1 if shorten else tokens, int(tokens * expected)
            allowed, granted, _ = limits.acquire(f"r{number}", [limit], 0, tokens, step, FREE, expects)
            if allowed:
                running[f"r{number}"] = min(expects, granted), 0
        elif action in ("use", "end") and running:
            index, part = rest
            request_id = sorted(running)[index % len(running)]
            granted, used = running[request_id]
            more = int((granted - used) * part)
            bucket.use(more, elapsed)
            running[request_id] = granted, used + more
            if action == "end":
                assert limits.settle(request_id, used + more, 0, True)
                del running[request_id]
        elif action == "grow" and running:
            index, part, wanted = rest
            request_id = sorted(running)[index % len(running)]
            may_use, used = running[request_id]
            used += int((may_use - used) * part)
            bucket.use(used - running[request_id][1], elapsed)
            if wanted:
                grown = limits.grow(request_id, used, int(value * wanted))
                assert grown is not None
                # No granted token is withdrawn.
                assert grown[0] >= may_use
                may_use = grown[0]
            else:
                assert limits.extend(request_id, used) == []
            running[request_id] = may_use, used
    # Every running request may use all of its reservation at once.
    bucket.use(sum(granted - used for granted, used in running.values()), elapsed)


@pytest.mark.parametrize("made", ["script", "twin"])
@pytest.mark.parametrize("kind", ["t", "d"])
def test_streams_that_grow_as_far_as_they_may_stay_within_the_promise(client: redis.Redis, made: str, kind: str):
    for seed in range(40):
        grow_streams(Script(client) if made == "script" else Twin(), kind, seed)


def grow_streams(limits: Script | Twin, kind: str, seed: int) -> None:
    """Run four streams that reserve the whole limit, hold none of it at first and use every granted token.

    The clock is set back now and then.
    """
    rng = random.Random(seed)
    value = rng.randint(100, 10**6)
    limit = Limit(f"tenant:{kind}", "tenant", kind, value)
    bucket, elapsed = Bucket(limit), 0
    running: dict[int, tuple[str, int, int]] = {}
    for number in range(60):
        moment = rng.choice([0, 0, rng.randint(0, 5 * SECOND), rng.randint(-3600 * SECOND, 0) * (rng.random() < 0.1)])
        limits.now += moment
        elapsed += max(0, moment)
        index, action = rng.randint(0, 3), rng.choice(["grow", "grow", "grow", "extend", "end"])
        part, wanted = rng.choice([0.0, 0.5, 1.0]), rng.choice([0.0, 0.3, 1.0])
        if index not in running:
            if limits.acquire(f"r{number}", [limit], 0, value, value, FREE, 0)[0]:
                running[index] = f"r{number}", 0, 0
            continue
        request_id, may_use, used = running[index]
        more = int((may_use - used) * part)
        used += more
        bucket.use(more, elapsed)
        if action == "end":
            assert limits.settle(request_id, used, 0, True)
            del running[index]
            continue
        if action == "extend":
            assert limits.extend(request_id, used) == []
        else:
            grown = limits.grow(request_id, used, int(value * wanted))
            assert grown is not None
            assert grown[0] >= may_use
            may_use = grown[0]
        running[index] = request_id, may_use, used
    bucket.use(sum(may_use - used for _, may_use, used in running.values()), elapsed)


@pytest.mark.parametrize("made", ["script", "twin"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from("rm"),
    value=st.integers(1, 20),
    steps=st.lists(
        st.tuples(st.one_of(waits, clock_steps), st.booleans(), st.booleans(), st.integers(0, 9)), max_size=40
    ),
)
def test_requests_that_count_stay_within_the_promise(
    client: redis.Redis, made: str, kind: str, value: int, steps: list[Any]
):
    """A request that is refunded, however late, gives others no more than its own slot."""
    limits = Script(client) if made == "script" else Twin()
    limit = Limit(f"tenant:{kind}", "tenant", kind, value)
    bucket, elapsed = Bucket(limit), 0
    running: dict[str, bool] = {}
    for number, (moment, ends, counts, index) in enumerate(steps):
        limits.now += moment
        elapsed += max(0, moment)
        if ends and running:
            request_id = sorted(running)[index % len(running)]
            assert limits.settle(request_id, 0, 0, running.pop(request_id))
        elif limits.acquire(f"r{number}", [limit], 0, 1, 1, FREE)[0]:
            running[f"r{number}"] = counts
            bucket.use(int(counts), elapsed)


@pytest.mark.parametrize("made", ["script", "twin"])
def test_long_requests_that_use_little_do_not_bank_a_window(client: redis.Redis, made: str):
    """Ten requests a minute apart, each for the whole limit: they once let 11 times the limit pass within 11 ms."""
    limits, limit = Script(client) if made == "script" else Twin(), Limit("tenant:t", "tenant", "t", 60_000)
    waiting = 0
    for number in range(10):
        waiting += limits.acquire(f"a{number}", [limit], 1, 59_999, 10**6, FREE)[0]
        limits.now += 60 * SECOND
    used = 0
    for number in range(20):
        if limits.acquire(f"b{number}", [limit], 1, 59_999, 10**6, FREE)[0]:
            limits.settle(f"b{number}", 60_000, 0, True)
            used += 60_000
        limits.settle(f"a{number}", 1, 0, True)
        limits.now += 1000
    assert waiting == 1
    assert used <= 60_000 * (1 + 0.02 / 60)


def test_an_ended_request_gives_its_reservation_back_at_once_and_owes_what_it_used(client: redis.Redis):
    script, limit = Script(client), Limit("tenant:t", "tenant", "t", 60_000)
    for number in range(600):
        # 1,000 tokens a second is the limit; the reservation is half of it.
        assert script.acquire(f"r{number}", [limit], 0, 30_000, 30_000, FREE)[0]
        script.now += SECOND // 2
        script.settle(f"r{number}", 1000, 0, True)
        script.now += SECOND // 2


def test_requests_of_the_release_before_are_settled_as_it_took_them(client: redis.Redis):
    """A reservation of the previous release is in the debt; its unused part is refunded unless it is paid off."""
    script, limit = Script(client), Limit("tenant:t", "tenant", "t", 60_000)
    state, leases, held, *_ = script.keys
    record = {
        "tokens": 50_000,
        "completion": 50_000,
        "cost": 0,
        "note": "{}",
        "at": script.now,
        "limits": ["tenant:t", 60_000],
    }
    client.hset(state, "tenant:t", struct.pack("dd", script.now, 50 * SECOND))
    client.hset(held, "old", msgspec.msgpack.encode(record))
    client.zadd(leases, {"old": script.now // 1000 + 10**9})
    assert not script.acquire("a", [limit], 0, 20_000, 20_000, FREE)[0]
    script.now += 20 * SECOND
    assert script.settle("old", 10_000, 0, True)
    # 50 s of debt, 20 of them paid off, 20 refunded: the 10 that were used are owed, and nothing is held.
    assert not script.acquire("b", [limit], 0, 50_001, 50_001, FREE)[0]
    assert script.acquire("b", [limit], 0, 50_000, 50_000, FREE)[0]
    assert not script.acquire("c", [limit], 0, 1, 1, FREE)[0]
    assert script.settle("b", 50_000, 0, True)
    # A gateway of the previous release settles our request: its tokens are held until the next count.
    assert script.acquire("d", [Limit("key:k:t", "key", "t", 100)], 0, 100, 100, FREE)[0]
    client.hdel(held, "d")
    client.zrem(leases, "d")
    other = [Limit("key:k:t", "key", "t", 100)]
    assert not script.acquire("e", other, 0, 100, 100, FREE)[0]
    assert script.acquire("e", other, 0, 100, 100, FREE)[0]


def test_a_clock_that_was_far_ahead_does_not_hold_a_tenant_for_ever(client: redis.Redis):
    script, limit = Script(client), Limit("tenant:r", "tenant", "r", 1)
    assert script.acquire("a", [limit], 0, 1, 1, FREE)[0]
    script.now -= 365 * DAY
    allowed, _, [(_, wait, *_)] = script.acquire("b", [limit], 0, 1, 1, FREE)
    assert (allowed, wait) == (False, 59_940)
    script.now += wait * 1000
    assert script.acquire("c", [limit], 0, 1, 1, FREE)[0]


@pytest.mark.parametrize("made", ["script", "twin"])
@pytest.mark.parametrize(("kind", "window"), [("t", 60 * SECOND), ("d", DAY)])
@pytest.mark.parametrize("parts", [0.25, 1.0, 40.0])
def test_a_clock_that_is_set_forward_gives_one_window_at_most(
    client: redis.Redis, made: str, kind: str, window: int, parts: float
):
    """A step counts as elapsed time. Time that passes again after a step back of at most an hour gives nothing."""
    limits = Script(client) if made == "script" else Twin()
    limit, value = Limit(f"tenant:{kind}", "tenant", kind, 1000), 1000

    def use_all(number: int) -> int:
        """Use all free tokens and return their number."""
        allowed, granted, _ = limits.acquire(f"r{number}", [limit], 0, value, 1, FREE, value)
        if allowed:
            assert limits.settle(f"r{number}", granted, 0, True)
        return granted if allowed else 0

    assert use_all(0) == value
    assert use_all(1) == 0
    limits.now += int(parts * window)
    assert use_all(2) == int(value * min(1.0, parts))
    assert use_all(3) == 0
    if parts * window <= 3600 * SECOND:
        limits.now -= int(parts * window)
        assert use_all(4) == 0
        limits.now += int(parts * window)
        assert use_all(5) == 0
