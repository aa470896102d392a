"""The quota's script on a clock that the test sets: against its twin in Python, step by step, and its guarantees."""

from collections.abc import Iterator
from datetime import UTC, datetime
from fractions import Fraction

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.limits.kinds import BY_LETTER, WINDOW_BY_LETTER
from gateway.quota.limits import Limit
from gateway.quota.local import LocalLimits
from gateway.quota.usage_backfill import UNKNOWN
from gateway.records.money.prices import Price
from tests.gateway.quota.scripted import DAY, MS, SECOND, START, Script, demand


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


values = st.one_of(st.integers(1, 30), st.integers(1, 10_000), st.integers(10**6, 10**10))
limit_sets = st.lists(
    st.builds(
        lambda owner, kind, value: Limit(f"{owner}:{kind}", owner, kind, value),
        st.sampled_from(["tenant", "key", "model"]),
        st.sampled_from(sorted(BY_LETTER)),
        values,
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda limit: limit.field,
)
prices = st.builds(
    Price, input=st.integers(0, 10**7), cached=st.integers(0, 10**7), output=st.sampled_from([0, 1, 999_999, 10**9])
)
waits = st.one_of(st.integers(0, 3 * SECOND), st.integers(0, 2 * DAY))
takes = st.tuples(
    st.just("take"),
    waits,
    st.integers(0, 50),
    st.one_of(st.integers(0, 20), st.integers(0, 10**6)),
    st.booleans(),
    st.floats(0, 1),
)
grows = st.tuples(st.just("grow"), waits, st.integers(0, 20), st.floats(0, 1.2), st.floats(0, 1), st.integers(0, 10**6))
settles = st.tuples(st.just("settle"), waits, st.integers(0, 20), st.floats(0, 2), st.booleans())
changes = st.tuples(st.just("change"), waits, st.integers(0, 5), values)
recounts = st.tuples(st.just("recount"), waits)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limits=limit_sets,
    price=prices,
    steps=st.lists(st.one_of(takes, settles, grows, changes, recounts), min_size=1, max_size=25),
)
def test_script_and_twin_agree_on_every_answer(client: redis.Redis, limits: list[Limit], price: Price, steps: list):
    script, twin = Script(client), LocalLimits()
    held: list[tuple[str, int, int]] = []
    for number, (action, wait, *rest) in enumerate(steps):
        script.now += wait
        if action == "take":
            prompt, completion, shorten, part = rest
            step = 1 if shorten else max(1, completion)
            request_id, expected = f"r{number}", int(completion * part)
            answer = twin.acquire(limits, demand(request_id, prompt, completion, step, price, expected), script.now)
            assert script.acquire(request_id, limits, prompt, completion, step, price, expected) == (
                answer.allowed,
                answer.granted,
                answer.states,
            )
            if answer.allowed:
                assert min(step, completion) <= answer.granted <= completion
                tokens = prompt + answer.granted
                held.append((request_id, tokens, price.highest_cost(prompt, answer.granted)))
        elif action == "recount":
            # The script sums up again, from their records, the amounts that running requests hold.
            script.call("extend", 10**9)
        elif action == "change":
            index, value = rest
            changed = limits[index % len(limits)]
            limits = [msgspec.structs.replace(each, value=value) if each is changed else each for each in limits]
        elif action == "grow" and held:
            index, part, more, expected = rest
            request_id, tokens, _ = held[index % len(held)]
            used, wanted = int(tokens * part), int(tokens * more)
            grown = twin.grow("", request_id, used, wanted, expected, script.now)
            found = script.grow(request_id, used, wanted, expected)
            assert found == (grown and (grown.usable_tokens, grown.wait, grown.field))
        elif held:
            index, part, counts = rest
            request_id, tokens, cost = held[index % len(held)]
            used, cost = int(tokens * part), int(cost * part)
            settled = twin.settle("", request_id, used, cost, counts=counts, now=script.now)
            assert script.settle(request_id, used, cost, counts) == settled


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limits=limit_sets.map(lambda found: [limit for limit in found if limit.letter not in "cou"]),
    price=prices,
    before=st.lists(st.tuples(st.integers(0, SECOND), st.integers(0, 30), st.integers(0, 1000)), max_size=15),
    tokens=st.integers(1, 1000),
)
@example(limits=[Limit("tenant:t", "tenant", "t", 7)], price=Price(), before=[(0, 0, 7)], tokens=3)
@example(limits=[Limit("key:d", "key", "d", 10**10)], price=Price(), before=[(0, 0, 10**10)], tokens=1)
@example(limits=[Limit("tenant:b", "tenant", "b", 5)], price=Price(output=10**6), before=[(0, 0, 5)], tokens=1)
def test_who_waits_as_long_as_told_is_served_and_who_waits_a_millisecond_less_is_not(
    client: redis.Redis, limits: list[Limit], price: Price, before: list, tokens: int
):
    script = Script(client)
    for number, (wait, prompt, completion) in enumerate(before):
        script.now += wait
        if script.acquire(f"r{number}", limits, prompt, completion, max(1, completion), price)[0]:
            tokens_used, cost = prompt + completion, price.highest_cost(prompt, completion)
            script.settle(f"r{number}", tokens_used, cost, True)
    if any(limit.amount(tokens, price.highest_cost(0, tokens)) > limit.value for limit in limits):
        return  # refused permanently, before any script call
    allowed, _, states = script.acquire("asks", limits, 0, tokens, tokens, price)
    wait = max((wait for _, wait, *_ in states), default=0)
    assert allowed == (wait == 0)
    if not allowed:
        script.now += (wait - 1) * MS
        assert not script.acquire("too early", limits, 0, tokens, tokens, price)[0]
        script.now += MS
        assert script.acquire("in time", limits, 0, tokens, tokens, price)[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from("rtdm"),
    value=values,
    steps=st.lists(st.tuples(st.integers(0, 20 * SECOND), st.integers(1, 10**6)), min_size=1, max_size=40),
)
def test_never_one_token_more_than_the_limit_and_what_came_back(
    client: redis.Redis, kind: str, value: int, steps: list
):
    """By exact arithmetic, a client that takes every free token each time never exceeds the limit."""
    script, limit = Script(client), Limit(f"tenant:{kind}", "tenant", kind, value)
    taken = 0
    for number, (wait, tokens) in enumerate(steps):
        script.now += wait
        allowed, granted, _ = script.acquire(f"r{number}", [limit], 0, tokens, 1, Price())
        if allowed:
            taken += limit.amount(granted, 0)
        elapsed = Fraction(script.now - START - steps[0][0], WINDOW_BY_LETTER[kind])
        # The script's own slack for the precision of doubles: 0.001 token.
        assert taken <= value * (1 + elapsed) + Fraction(2, 1000)


LAST_DAYS = {
    "b": ["2026-02-28", "2028-02-29", "2026-12-31", "2026-04-30", "2100-02-28"],
    # Sundays, and any days.
    "w": ["2026-11-22", "2026-01-04", "2028-12-31", "1970-01-04"],
    "j": ["2026-11-23", "2026-12-31", "2028-02-28", "1970-01-01"],
}


@pytest.mark.parametrize(("kind", "before_it_ends"), [(kind, day) for kind, days in LAST_DAYS.items() for day in days])
def test_a_budget_is_of_a_calendar_period(client: redis.Redis, kind: str, before_it_ends: str):
    script = Script(client)
    script.now = int(datetime.fromisoformat(before_it_ends).replace(tzinfo=UTC).timestamp()) * SECOND + DAY - SECOND
    limits, price = [Limit(f"tenant:{kind}", "tenant", kind, 100)], Price(output=10**6)
    assert script.acquire("a", limits, 0, 100, 100, price) == (True, 100, [(0, 0, 1000, 0)])
    # All of it is only reserved.
    assert script.acquire("b", limits, 0, 1, 1, price) == (False, 1, [(0, 1000, 1000, 100)])
    script.now += SECOND
    # A new period; settlements of the last one do not count in it.
    assert script.acquire("c", limits, 0, 60, 60, price)[0]
    assert script.settle("a", 10, 10, True)
    allowed, _, [(remaining, *_)] = script.acquire("d", limits, 0, 41, 41, price)
    assert (allowed, remaining) == (False, 40)


def test_a_rolling_budget_has_room_again_when_a_days_spending_is_30_days_old(client: redis.Redis):
    script, limits, price = Script(client), [Limit("tenant:l", "tenant", "l", 100)], Price(output=10**6)
    # Two seconds before midnight, then on the next day, then a day without room.
    assert script.acquire("a", limits, 0, 10, 10, price) == (True, 10, [(90, 0, 29 * DAY_MS + 2000, 0)])
    assert script.acquire("spent", limits, 0, 50, 50, price)[0]
    assert script.settle("spent", 50, 50, True)
    script.now += DAY
    assert script.acquire("b", limits, 0, 40, 40, price) == (True, 40, [(0, 0, 29 * DAY_MS + 2000, 10)])
    assert script.settle("b", 30, 30, True)
    script.now += DAY
    wait = 27 * DAY_MS + 2000
    assert script.acquire("c", limits, 0, 50, 50, price) == (False, 50, [(10, wait, wait + DAY_MS, 10)])
    script.now += (wait - 1) * MS
    assert not script.acquire("d", limits, 0, 50, 50, price)[0]
    script.now += MS
    # The settlement of a request of a day that no longer counts changes nothing.
    assert script.settle("a", 1, 1, True)
    assert script.acquire("e", limits, 0, 70, 70, price) == (True, 70, [(0, 0, 30 * DAY_MS, 0)])
    script.now += 40 * DAY
    assert script.acquire("f", limits, 0, 100, 100, price)[0]


def test_a_rolling_budget_is_backfilled_by_day(client: redis.Redis):
    script, limit = Script(client), Limit("tenant:l", "tenant", "l", 1000)
    assert ask(script, "a", limit, 1, PER_TOKEN)[0] == UNKNOWN
    days = [500, *[0] * 28, 300]
    script.call("backfill", limit.field, limit.value, script.now, 800, 800, *days)
    # A row that reached the ledger late counts on the day of the backfill.
    script.call("backfill", limit.field, limit.value, script.now, 850, 850, *days[:-1], 350)
    assert ask(script, "a", limit, 151, PER_TOKEN)[:5] == [0, 151, script.now, 150, 2000]
    script.now += 2 * SECOND
    assert ask(script, "b", limit, 651, PER_TOKEN)[3:5] == [650, 29 * DAY_MS]
    assert ask(script, "c", limit, 650, PER_TOKEN)[0] == 1


def ask(script: Script, request_id: str, limit: Limit, tokens: int, price: Price) -> list[int]:
    """Return the script's raw answer, which also lists the limits to backfill or check."""
    asked = (0, tokens, tokens, max(1, tokens))
    call = ("acquire", request_id, 10**9, *asked, price.highest_input, price.output, "{}")
    return script.call(*call, limit.field, limit.value)


PER_TOKEN = Price(output=10**6)
DAY_MS = DAY // MS


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from("bdjlw"),
    brought=st.lists(st.tuples(st.integers(0, 500), st.sampled_from([0, 0, 0, -1, 1])), min_size=1, max_size=8),
)
def test_what_several_gateways_backfill_adds_up_in_any_order(client: redis.Redis, kind: str, brought: list):
    """The largest result for the noted moment counts; results for another moment, before the data loss, do not."""
    script, limit = Script(client), Limit(f"tenant:{kind}", "tenant", kind, 1000)
    since = script.now
    assert ask(script, "a", limit, 1, PER_TOKEN) == [UNKNOWN, 0, since]
    for known, moment in brought:
        script.call("backfill", limit.field, limit.value, since + moment, known, known)
        script.now += 1
    known_then = [known for known, moment in brought if moment == 0]
    if not known_then:
        assert ask(script, "a", limit, 1, PER_TOKEN) == [UNKNOWN, 0, since]
        return
    most = max(known_then)
    allowed, granted, admitted_at, remaining, *_ = ask(script, "a", limit, 100, PER_TOKEN)
    assert (allowed, granted, admitted_at) == (1, 100, script.now)
    # A microsecond restores no visible part of a day's tokens.
    assert remaining == 1000 - most - 100


def test_what_was_backfilled_is_checked_at_twice_the_age_each_time(client: redis.Redis):
    script, limit = Script(client), Limit("key:k:b", "key", "b", 10**6)
    _, _, since = ask(script, "a", limit, 1, PER_TOKEN)
    script.call("backfill", limit.field, limit.value, since, 0, 0)
    checked = []
    for number in range(400):
        script.now += 100 * MS
        asks_for = ask(script, f"r{number}", limit, 1, PER_TOKEN)[7:]
        if asks_for:
            assert asks_for == [0, since]
            checked.append((script.now - since) // MS)
    assert checked == [300, 600, 1200, 2400, 4800, 9600, 19200, 38400]


def test_a_new_month_begins_without_the_ledger_and_is_checked_against_it(client: redis.Redis):
    script, limit = Script(client), Limit("tenant:b", "tenant", "b", 100)
    script.now = int(datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC).timestamp()) * SECOND
    _, _, since = ask(script, "a", limit, 1, PER_TOKEN)
    script.call("backfill", limit.field, limit.value, since, 90, 90)
    assert ask(script, "a", limit, 11, PER_TOKEN)[0] == 0
    script.now += 2 * SECOND
    # A late answer about the old month is ignored.
    script.call("backfill", limit.field, limit.value, since, 95, 95)
    assert ask(script, "b", limit, 50, PER_TOKEN)[7:] == [0, script.now]
    script.call("backfill", limit.field, limit.value, script.now, 30, 30)
    assert ask(script, "c", limit, 21, PER_TOKEN)[0] == 0
    assert ask(script, "d", limit, 20, PER_TOKEN)[0] == 1


def test_what_is_backfilled_of_the_last_month_makes_no_state(client: redis.Redis):
    script, limit = Script(client), Limit("tenant:b", "tenant", "b", 100)
    script.now = int(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()) * SECOND
    _, _, since = ask(script, "a", limit, 1, PER_TOKEN)
    script.now += 2 * SECOND
    script.call("backfill", limit.field, limit.value, since, 90, 90)
    assert ask(script, "a", limit, 1, PER_TOKEN) == [UNKNOWN, 0, script.now]
