"""The quota on a real Valkey, and on a cluster of three: all or nothing, on its clock, settled once."""

import asyncio
import contextlib
import re
import socket
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest, RateLimited, Unavailable
from gateway.quota.demand import Demand, RequestSize
from gateway.quota.limits import Limit, LimitState
from gateway.quota.quota import Quota
from gateway.quota.refusals import check_possible, describe_wait, format_duration, refusal
from gateway.quota.reservation import Reservation
from gateway.quota.store import QuotaStore
from gateway.records.money.prices import Price
from gateway.redis.client import Client, connect
from gateway.redis.keys import REGISTERED_TENANTS_KEY
from testing.gateway.principals import principal
from testing.gateway.quotas import dump, settle, take
from testing.gateway.running import until


@pytest.mark.parametrize(
    ("limits", "tokens", "kind"),
    [
        ({"requests_per_minute": 50}, 1, "requests"),
        ({"tokens_per_minute": 5000}, 100, "tokens"),
        ({"tokens_per_day": 5000}, 100, "tokens"),
        ({"max_concurrent": 50}, 1, "concurrency"),
        ({"max_concurrent_tokens": 5000}, 100, "concurrency"),
        ({"budget_per_month": 5000}, 100, "budget"),
    ],
)
# All owners' limits are fields of one hash, so a cluster treats them alike.
@pytest.mark.parametrize(
    ("any_redis", "owner"),
    [("redis_url", "tenant"), ("redis_url", "key"), ("redis_url", "model"), ("cluster_url", "tenant")],
    indirect=["any_redis"],
)
async def test_200_at_once_against_a_limit_of_50(limits: dict, tokens: int, kind: str, owner: str, quota: Quota):
    who = principal(**{owner: limits})
    started = time.monotonic()
    price = Price(output=1_000_000)
    tasks = (take(quota, who, tokens, price=price) for _ in range(200))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    taken = [result for result in results if isinstance(result, Reservation)]
    refused = [result for result in results if isinstance(result, RateLimited)]
    assert len(taken) + len(refused) == 200
    # At 50 a minute one is regained every 1.2 s, on however slow a machine.
    came_back = (time.monotonic() - started) / 1.2 if "minute" in str(limits) else 0
    assert 50 <= len(taken) <= 50 + came_back
    assert {refusal.kind for refusal in refused} == {kind}
    assert all(refusal.status == 429 and f" this {owner}" in refusal.message for refusal in refused)
    # The budget is only reserved.
    assert {refusal.code for refusal in refused} == {"rate_limit_exceeded"}


async def test_a_refusal_consumes_nothing(quota: Quota, redis: Client):
    """A request refused by the model's limit takes nothing of its tenant's or its key's."""
    who = principal(
        tenant={"requests_per_minute": 2, "max_concurrent": 2, "tokens_per_day": 100, "budget_per_month": 100},
        key={"requests_per_minute": 10, "max_concurrent_tokens": 1000},
        model={"tokens_per_day": 50},
    )
    price = Price(output=1_000_000)
    await take(quota, who, 30, price=price)
    before = await dump(redis, who)
    for _ in range(5):
        with pytest.raises(RateLimited, match=r"this model: 50 tokens per day; needed 21 \(.*\), remaining 20"):
            await take(quota, who, 21, price=price)
    assert await dump(redis, who) == before
    last = await take(quota, who, 20, price=price)
    assert last.headers["x-ratelimit-remaining-requests"] == "0"


async def test_what_is_not_limited_is_not_kept(quota: Quota, redis: Client):
    who = principal()
    taken = await take(quota, who, 10**6)
    assert taken.headers == {}
    assert set(await dump(redis, who)) == {"held", "leases"}
    await settle(quota, taken, 5)
    assert set(await dump(redis, who)) == {"usage"}


async def test_headers_are_those_of_the_tightest_limit(quota: Quota):
    who = principal(tenant={"requests_per_minute": 100, "tokens_per_minute": 1000}, key={"tokens_per_minute": 500})
    headers = (await take(quota, who, 100)).headers
    assert headers == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "99",
        "x-ratelimit-reset-requests": "600ms",
        "x-ratelimit-limit-tokens": "500",
        "x-ratelimit-remaining-tokens": "400",
        "x-ratelimit-reset-tokens": "12s",
    }


async def test_headers_tell_of_a_days_tokens_where_fewer_are_left_of_them(quota: Quota):
    who = principal(tenant={"tokens_per_minute": 1000, "tokens_per_day": 500})
    headers = (await take(quota, who, 100)).headers
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("500", "400")
    with pytest.raises(RateLimited) as refused:
        await take(quota, who, 450)
    reported = refused.value.headers
    assert reported["x-ratelimit-limit-tokens"] == "500"
    assert 400 <= int(reported["x-ratelimit-remaining-tokens"]) < 450


@pytest.mark.parametrize("limit", ["tokens_per_minute", "tokens_per_day", "max_concurrent_tokens", "budget_per_month"])
async def test_an_answer_is_shortened_to_what_is_left_if_the_tenant_chose_that(limit: str, quota: Quota):
    who = principal(tenant={limit: 10_000}, on_token_limit="shorten")
    price = Price(output=1_000_000)
    whole = await quota.acquire(who, "base", uuid.uuid4().hex, RequestSize(0, 9000, price=price))
    assert (whole.max_tokens, "x-loraplex-max-tokens" in whole.headers) == (9000, False)
    short = await quota.acquire(who, "base", uuid.uuid4().hex, RequestSize(0, 700, choices=2, price=price))
    # A tenant regains 167 tokens a second of a minute's.
    regained = 150 if limit == "tokens_per_minute" else 0
    assert 500 <= short.max_tokens <= 500 + regained
    assert (short.tokens, short.headers["x-loraplex-max-tokens"]) == (2 * short.max_tokens, str(short.max_tokens))
    size = RequestSize(1000, 700, price=Price(input=10**6, output=10**6))
    reserved = r"\." if limit == "max_concurrent_tokens" else r", and [\d.]+ (is|are) reserved by running requests"
    parts = r"\(1000 of the prompt, at least 1 for the answer: max_tokens is 700\)"
    with pytest.raises(
        RateLimited, match=rf"(needed 1001 {parts}, remaining \d+|may cost 0\.001001, [\d.]+ is left){reserved}"
    ):
        await quota.acquire(who, "base", uuid.uuid4().hex, size)


async def test_choices_are_granted_evenly_or_not_at_all(quota: Quota):
    who = principal(tenant={"max_concurrent_tokens": 107}, on_token_limit="shorten")
    taken = await quota.acquire(who, "base", "a", RequestSize(7, 50, choices=3))
    assert (taken.max_tokens, taken.tokens) == (33, 7 + 99)
    with pytest.raises(RateLimited):
        await quota.acquire(who, "base", "b", RequestSize(0, 50, choices=2))


async def test_settling_gives_back_what_was_not_used_and_only_once(quota: Quota, redis: Client):
    who = principal(tenant={"max_concurrent_tokens": 1000, "max_concurrent": 1, "budget_per_month": 1000})
    price = Price(output=1_000_000)
    first = await take(quota, who, 900, price=price)
    entry = await quota.settle(first, tokens=100, cost=100, event=b'{"a":1}')
    assert entry is not None
    for _ in range(3):
        assert await quota.settle(first, tokens=100, cost=100, event=b'{"a":1}') is None
    assert await redis.xrange(f"loraplex:{{{who.tenant.id}}}:usage") == [(entry, {b"event": b'{"a":1}'})]
    second = await take(quota, who, 900, price=price)
    await quota.settle(second, tokens=900, cost=900, event=b'{"a":2}')
    with pytest.raises(RateLimited, match=r" 0\.00 is left"):
        await take(quota, who, 1, price=price)


async def test_settling_at_the_same_time_adds_one_event(quota: Quota, redis: Client):
    who = principal(tenant={"max_concurrent": 5})
    taken = await take(quota, who)
    ids = await asyncio.gather(*(settle(quota, taken, 1) for _ in range(20)))
    assert sum(entry is not None for entry in ids) == 1
    assert await redis.xlen(f"loraplex:{{{who.tenant.id}}}:usage") == 1


async def test_a_request_that_does_not_count_is_given_back_whole_and_once(quota: Quota, redis: Client):
    who = principal(tenant={"requests_per_minute": 3, "tokens_per_day": 1000})
    await settle(quota, await take(quota, who, 1), 1)
    refused = await take(quota, who, 900)
    for _ in range(3):
        await settle(quota, refused, 0, counts=False)
    after = await take(quota, who, 999)
    # Two of three are taken; a third is regained every 20 s.
    assert int(after.headers["x-ratelimit-remaining-requests"]) >= 1


async def test_settling_more_than_was_taken_is_owed(quota: Quota):
    who = principal(tenant={"tokens_per_day": 1000})
    await settle(quota, await take(quota, who, 100), 1500)
    with pytest.raises(RateLimited) as refused:
        await take(quota, who, 1)
    # 501 tokens too many; one is paid off every 86.4 s.
    assert 43_100 <= int(refused.value.headers["Retry-After"]) <= 43_287


async def test_the_same_request_sent_twice_is_taken_once(quota: Quota):
    who = principal(tenant={"max_concurrent": 1, "budget_per_month": 100}, on_token_limit="shorten")
    price = Price(output=1_000_000)
    once = await take(quota, who, 150, request_id="a", price=price)
    again = await take(quota, who, 150, request_id="a", price=price)
    assert once.max_tokens == again.max_tokens == 100


@pytest.mark.parametrize("limit", ["tokens_per_minute", "tokens_per_day", "max_concurrent_tokens", "budget_per_month"])
async def test_what_can_never_pass_is_said_at_once(limit: str, quota: Quota):
    who = principal(tenant={limit: 100})
    price = Price(output=1_000_000)
    with pytest.raises(BadRequest, match="never") as refused:
        await take(quota, who, 101, price=price)
    assert (refused.value.param, refused.value.code) == ("max_tokens", "request_exceeds_limit")
    await take(quota, who, 100, price=price)


async def test_all_keys_of_a_tenant_share_a_hash_tag_and_expire(quota: Quota, redis: Client):
    who = principal(tenant={"max_concurrent": 5, "tokens_per_day": 100})
    await take(quota, who)
    keys = [key async for key in redis.scan_iter(f"*{who.tenant.id}*")]
    assert len(keys) == 3
    for key in keys:
        assert f"{{{who.tenant.id}}}".encode() in key
        assert 0 < await redis.pttl(key) <= 35 * 86_400_000
    assert await redis.zscore(REGISTERED_TENANTS_KEY, who.tenant.id) > 0


async def test_limits_of_keys_that_are_gone_are_forgotten(quota: Quota, redis: Client):
    who = principal()
    state = f"loraplex:{{{who.tenant.id}}}:quota"
    for key_id in range(40):
        keyed = principal(tenant_id=who.tenant.id, key_id=f"{key_id:016x}", key={"tokens_per_minute": 10**9})
        await settle(quota, await take(quota, keyed), 1)
    assert await redis.hlen(state) == 40

    async def forgotten() -> bool:
        await quota.expired(who.tenant.id)
        return not await redis.exists(state)

    await until(forgotten)


async def test_the_script_is_brought_to_a_server_that_does_not_know_it(quota: Quota, redis: Client):
    who = principal(tenant={"max_concurrent": 2})
    taken = await take(quota, who)
    await redis.script_flush()
    assert await settle(quota, taken, 1) is not None
    await redis.script_flush()
    await take(quota, who)


async def test_one_tenants_broken_state_is_its_own_trouble(quota: Quota, redis: Client):
    broken, well = principal(tenant={"max_concurrent": 1}), principal(tenant={"max_concurrent": 100})
    await redis.set(f"loraplex:{{{broken.tenant.id}}}:quota", "no hash")
    for _ in range(5):
        with pytest.raises(Unavailable):
            await take(quota, broken)
        await take(quota, well)
        with pytest.raises(Unavailable):
            await take(quota, broken)
    assert not quota.away


async def test_an_answer_that_came_too_late_is_nobody_elses(redis: Client):
    busy = "local start = os.clock() repeat until os.clock() > start + 0.3 return 'late'"
    store = QuotaStore(redis, timeout=0.1)
    with contextlib.suppress(Unavailable):
        await store.call(lambda: redis.execute_command("EVAL", busy, 1, "{a}"))
    answers = await asyncio.gather(*(redis.execute_command("EVAL", f"return {i}", 1, "{a}") for i in range(20)))
    assert answers == list(range(20))
    await store.close()


@pytest.mark.usefixtures("starts_servers")
async def test_a_server_that_does_not_answer_is_given_up_in_time():
    """A silent server is abandoned in time: an open socket without answers is worse than a closed one.

    After two calls no request waits for it.
    """
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    redis = connect(f"redis://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
    quota = Quota(redis, timeout=0.3, lease_seconds=30)
    for _ in range(200):
        with pytest.raises(Unavailable) as refused:
            await take(quota, principal(tenant={"max_concurrent": 1}))
        assert refused.value.status == 503
    assert quota.away
    await quota.close()
    await redis.aclose()
    silent.close()


def test_waits_are_said_for_people_and_never_too_short():
    said = {
        0: "0 s",
        38: "38 s",
        119: "119 s",
        120: "2 min",
        121: "3 min",
        3600: "1 h",
        7501: "2 h 6 min",
        86_400: "1 d",
    }
    said |= {86_400: "1 d", 90_000: "1 d 1 h", 818_558: "9 d 12 h", 86_399: "1 d"}
    assert {seconds: describe_wait(seconds) for seconds in said} == said


@given(st.integers(min_value=0, max_value=10**7))
def test_durations_read_back_as_what_was_written(milliseconds: int):
    written = format_duration(milliseconds)
    if written.endswith("ms"):
        assert int(written[:-2]) == milliseconds
    else:
        parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?([\d.]+)s", written)
        assert parts is not None
        hours, minutes, seconds = (float(part or 0) for part in parts.groups())
        assert round((hours * 3600 + minutes * 60 + seconds) * 1000) == milliseconds
        assert max(minutes, seconds) < 60
        assert parts[1] is None or parts[2] is not None


def test_durations_are_as_openai_writes_them():
    written = {83_808_000: "23h16m48s", 3_600_000: "1h0m0s", 360_000: "6m0s", 1200: "1.2s", 12: "12ms"}
    assert {milliseconds: format_duration(milliseconds) for milliseconds in written} == written


def refused(kind: str, value: int, remaining: int, cost: int = 0) -> str:
    limit = Limit(f"tenant:{kind}", "tenant", kind, value)
    demand = Demand(tenant_id="t", request_id="r", prompt_tokens=5, price=Price(input=cost * 200_000))
    return refusal([limit], [LimitState(remaining, 90_000, 90_000, 0)], demand, {}).message


def test_refusals_say_one_thing_in_the_singular_and_money_as_money():
    assert refused("c", 1, 0).startswith("Rate limit reached for this tenant: 1 concurrent request; needed 1,")
    assert refused("r", 2, 0).startswith("Rate limit reached for this tenant: 2 requests per minute; needed 1,")
    used_up = refused("b", 50, 0, cost=38)
    start = "This month's budget of this tenant, 0.00005, is used up: the request may cost 0.000038, 0.00 is left. Try"
    assert used_up.startswith(start)
    assert "is nearly used up: the request may cost 0.000038, 0.00001 is left." in refused("b", 50, 10, cost=38)


def test_a_refused_request_without_max_tokens_is_told_of_the_default():
    limits = [Limit("tenant:t", "tenant", "t", 10)]
    with pytest.raises(BadRequest, match="can never be admitted") as found:
        check_possible(limits, Demand(tenant_id="t", request_id="r", prompt_tokens=5, max_tokens=64, step=64))
    assert "69 tokens (5 of the prompt and 64 of the answer)" in found.value.message
    assert "default" not in found.value.message
    demand = Demand(tenant_id="t", request_id="r", prompt_tokens=5, max_tokens=64, step=64, by_default=True)
    with pytest.raises(BadRequest) as found:
        check_possible(limits, demand)
    said = "69 tokens (5 of the prompt and 64 of the answer: 64 is the default, because max_tokens is not set)"
    assert said in found.value.message
    message = refusal([Limit("tenant:t", "tenant", "t", 100)], [LimitState(40, 9000, 9000, 0)], demand, {}).message
    said = "(5 of the prompt, 64 for the answer: 64 is the default, because max_tokens is not set)"
    assert f"needed 69 {said}, remaining 40." in message


def test_a_refusal_by_a_token_limit_says_for_what_its_tokens_are_needed():
    def refused_for(value: int, **asked: int) -> str:
        demand = Demand(tenant_id="t", request_id="r", prompt_tokens=13, **asked)
        limit = Limit("tenant:t", "tenant", "t", value)
        return refusal([limit], [LimitState(40, 9000, 9000, 0)], demand, {}).message

    whole = refused_for(500, max_tokens=460, step=460)
    assert "needed 473 (13 of the prompt, 460 for the answer: max_tokens is 460), remaining 40." in whole
    # A stream holds less at first than it may generate.
    stream = refused_for(1000, max_tokens=900, step=900, expected=200)
    assert "needed 463 (13 of the prompt, at least 450 for the answer: max_tokens is 900), remaining 40." in stream
    both = refused_for(500, max_tokens=100, choices=2, step=200)
    said = "(13 of the prompt, 200 for the answer: max_tokens is 100 for each of 2 answers)"
    assert f"needed 213 {said}, remaining 40." in both
    assert "needed 0, remaining" in refused_for(0, max_tokens=9, step=9)
