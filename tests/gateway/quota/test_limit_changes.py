"""A changed rate keeps the used amount, in the script on a real Valkey and in its twin in Python."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.limits.kinds import WINDOW_BY_LETTER
from gateway.quota.limits import Limit
from gateway.records.money.prices import FREE
from tests.gateway.quota.scripted import DAY, SECOND, START, Bucket, Script, Twin

values = st.one_of(st.integers(2, 100), st.integers(1000, 10**7))


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(params=["script", "twin"])
def limits(request: pytest.FixtureRequest, client: redis.Redis) -> Script | Twin:
    return Script(client) if request.param == "script" else Twin()


def limit_of(kind: str, value: int) -> Limit:
    return Limit(f"tenant:{kind}", "tenant", kind, value)


def use(limits: Script | Twin, request_id: str, limit: Limit, tokens: int) -> bool:
    """Reserve tokens and use them at once. Return whether they were granted."""
    allowed, *_ = limits.acquire(request_id, [limit], 0, tokens, tokens, FREE)
    if allowed:
        limits.settle(request_id, tokens, 0, True)
    return allowed


def remaining(limits: Script | Twin, limit: Limit) -> int:
    """Return the remaining amount without reserving anything."""
    allowed, _, [(left, *_)] = limits.acquire("asks", [limit], 0, 0, 1, FREE)
    if allowed:
        limits.settle("asks", 0, 0, False)
    return left + (allowed and limit.letter == "r")


class Reference:
    """Leaky bucket of the amount really used. A changed limit leaves the amount as it is.

    It empties at the limit's rate; while it holds more than a lowered limit, at the former limit's.
    """

    def __init__(self, limit: Limit, now: int) -> None:
        self.window, self.rate, self.level, self.at = WINDOW_BY_LETTER[limit.letter], limit.value, 0.0, now

    def left(self, limit: Limit, now: int) -> float:
        self.level = max(0.0, self.level - (now - self.at) * self.rate / self.window)
        self.at = now
        if self.level <= limit.value:
            self.rate = limit.value
        return max(0.0, limit.value - self.level)


@pytest.mark.parametrize("kind", ["t", "d"])
def test_a_raised_limit_leaves_all_but_what_was_used(limits: Script | Twin, kind: str):
    assert use(limits, "a", limit_of(kind, 100), 97)
    assert remaining(limits, limit_of(kind, 1_000_000)) == 1_000_000 - 97
    assert use(limits, "b", limit_of(kind, 1_000_000), 1_000_000 - 97)
    assert not use(limits, "c", limit_of(kind, 1_000_000), 1)


@pytest.mark.parametrize("kind", ["t", "d"])
def test_a_lowered_limit_leaves_less_by_what_was_used(limits: Script | Twin, kind: str):
    assert use(limits, "a", limit_of(kind, 1_000_000), 97)
    assert remaining(limits, limit_of(kind, 100)) == 3
    # The 97 are paid off at the new rate.
    limits.now += WINDOW_BY_LETTER[kind] // 2
    assert remaining(limits, limit_of(kind, 100)) == 53


@pytest.mark.parametrize("kind", ["t", "d"])
def test_a_limit_below_what_was_used_refuses_for_less_than_its_window(limits: Script | Twin, kind: str):
    small, window = limit_of(kind, 1000), WINDOW_BY_LETTER[kind]
    assert use(limits, "a", limit_of(kind, 1_000_000), 900_000)
    # 899,001 are paid off in 0.899 windows at the former rate, and one at the new rate.
    _, _, [(left, wait, reset, _)] = limits.acquire("b", [small], 0, 1, 1, FREE)
    assert left == 0
    assert wait == pytest.approx(0.9 * window / 1000, rel=0.001)
    assert reset == pytest.approx((0.899 + 1) * window / 1000, rel=0.001)
    # Raised again, it is as if it had never been lowered.
    assert remaining(limits, limit_of(kind, 1_000_000)) == 100_000
    limits.now += wait * 1000
    assert use(limits, "c", small, 1)
    assert remaining(limits, small) <= 1000


def test_requests_count_after_a_change_too(limits: Script | Twin):
    few, many = limit_of("r", 10), limit_of("r", 1000)
    for number in range(9):
        assert use(limits, f"r{number}", few, 1)
    assert remaining(limits, many) == 991
    assert remaining(limits, few) == 1


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from("tdrm"),
    first=values,
    steps=st.lists(
        st.tuples(st.one_of(st.integers(0, SECOND), st.integers(0, 2 * DAY)), st.floats(0, 1), st.none() | values),
        min_size=2,
        max_size=30,
    ),
)
def test_what_remains_is_the_reference_buckets(
    client: redis.Redis, kind: str, first: int, steps: list[tuple[int, float, int | None]]
):
    for limits in (Script(client), Twin()):
        limit = limit_of(kind, first)
        reference = Reference(limit, limits.now)
        for number, (wait, part, value) in enumerate(steps):
            limits.now += wait
            if value is not None:
                limit = limit_of(kind, value)
            left = reference.left(limit, limits.now)
            tokens = 1 if kind in "rm" else max(1, int(left * part))
            allowed, _, [(shown, reset, *_)] = limits.acquire(f"r{number}", [limit], 0, tokens, tokens, FREE)
            assert shown + (tokens if allowed else 0) == pytest.approx(left, abs=1.01, rel=1e-9)
            assert allowed or tokens > left - 0.01
            assert reset <= 2 * WINDOW_BY_LETTER[kind] / 1000
            if allowed:
                limits.settle(f"r{number}", tokens, 0, True)
                reference.level += tokens


begins = st.tuples(st.just("begin"), st.integers(0, 90 * SECOND), st.floats(0, 1), st.floats(0, 1))
uses = st.tuples(st.sampled_from(["grow", "grow", "end"]), st.integers(0, 5 * SECOND), st.floats(0, 1), st.floats(0, 1))
changes = st.tuples(st.just("change"), st.integers(0, 90 * SECOND), st.floats(0, 1), values)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=values, steps=st.lists(st.one_of(begins, begins, uses, uses, changes), min_size=2, max_size=50))
def test_requests_admitted_after_a_change_stay_within_the_new_limit(
    client: redis.Redis, first: int, steps: list[tuple[str, int, float, Any]]
):
    """Requests admitted before the change may use and grow their holds, which leaves less room for later requests."""
    for limits in (Script(client), Twin()):
        limit = limit_of("t", first)
        bucket, since = Bucket(limit), START
        # Request -> (total tokens that it may use, tokens used so far, whether it was admitted under this limit).
        running: dict[str, tuple[int, int, bool]] = {}
        for number, (action, wait, part, other) in enumerate(steps):
            limits.now += wait
            if action == "change":
                limit = limit_of("t", other)
                bucket, since = Bucket(limit), limits.now
                running = {each: (may_use, used, False) for each, (may_use, used, _) in running.items()}
                remaining(limits, limit)
            elif action == "begin":
                tokens = max(1, int(limit.value * part))
                expected = int(tokens * other)
                if limits.acquire(f"r{number}", [limit], 0, tokens, tokens, FREE, expected)[0]:
                    running[f"r{number}"] = expected, 0, True
            elif running:
                request_id = sorted(running)[int(other * (len(running) - 1))]
                may_use, used, is_new = running.pop(request_id)
                more = int((may_use - used) * part)
                if is_new:
                    bucket.use(more, limits.now - since)
                if action == "end":
                    limits.settle(request_id, used + more, 0, True)
                    continue
                grown = limits.grow(request_id, used + more, int(limit.value * other))
                assert grown is not None
                running[request_id] = max(may_use, grown[0]), used + more, is_new
        bucket.use(sum(may_use - used for may_use, used, is_new in running.values() if is_new), limits.now - since)


def test_states_of_the_release_before_keep_working(client: redis.Redis):
    """A state of the previous release has no basis: its debt is in the unit of the limit in force when first read."""
    script = Script(client)
    state = script.keys[0]
    # Stores the server's run id, so that the script does not drop the states as another server's.
    remaining(script, limit_of("d", 100))
    client.hset(state, "tenant:t", struct.pack("dd", script.now, 30 * SECOND))
    client.hset(state, "tenant:d", struct.pack("ddddd", script.now, DAY // 4, script.now - 1, 0, script.now + DAY))
    assert remaining(script, limit_of("t", 60)) == 30
    assert use(script, "a", limit_of("t", 60), 10)
    assert use(script, "b", limit_of("d", 100), 25)
    assert remaining(script, limit_of("t", 1000)) == 1000 - 40
    assert remaining(script, limit_of("d", 1000)) == 1000 - 50


def test_gateways_that_still_know_the_former_limit_forget_nothing(limits: Script | Twin):
    before, after = limit_of("d", 1_000_000), limit_of("d", 100)
    assert use(limits, "a", before, 900_000)
    for _ in range(3):
        assert remaining(limits, after) == 0
        assert remaining(limits, before) == 100_000


def test_usage_above_a_lowered_limit_is_backfilled_for_a_day_at_most(client: redis.Redis):
    script, limit = Script(client), limit_of("d", 100)
    call = ("acquire", "a", 10**9, 0, 1, 1, 1, 0, 0, "{}", limit.field, limit.value)
    _, _, since = script.call(*call)
    script.call("backfill", limit.field, limit.value, since, 900_000.0, 900_000)
    assert remaining(script, limit) == 0
    script.now += DAY
    assert remaining(script, limit) == 100


def test_a_refund_after_a_raise_gives_back_no_more_than_its_own_request(limits: Script | Twin):
    few, many = limit_of("r", 2), limit_of("r", 1000)
    limits.acquire("a", [few], 0, 0, 1, FREE)
    limits.acquire("b", [few], 0, 0, 1, FREE)
    assert remaining(limits, many) == 998
    limits.settle("a", 0, 0, False)
    assert remaining(limits, many) == 999
