"""Holds that follow their streams: what honest clients get of a token rate, and what a stream meets at its end."""

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis

from gateway.quota import growing_hold
from gateway.quota.growing_hold import MARGIN, Expectations, Pace
from gateway.quota.limits import Limit
from gateway.quota.local import Grown, LocalLimits
from gateway.records.money.prices import FREE
from testing.gateway.running import HI_TOKENS, Gateway, until
from testing.gateway.upstream import Upstream
from testing.gateway.upstream_bodies import PROMPT_TOKENS
from tests.gateway.quota.honest import LIMIT, Clients
from tests.gateway.quota.scripted import SECOND, START, Script, demand
from wire.headers import MAX_TOKENS_HEADER


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def upstream(upstream: Upstream) -> Upstream:
    upstream.keeps_allowances = True
    return upstream


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("at_once", [pytest.param(100, marks=pytest.mark.slow), 200])
@pytest.mark.parametrize(
    ("max_tokens", "median", "spread", "lasts"),
    [
        (4096, 300, 0, lambda completion: 20),
        (4096, 300, 0.6, lambda completion: completion / 15),
        (30_000, 1000, 0, lambda completion: 60),
        (30_000, 1000, 0.6, lambda completion: completion * 60 / 1000),
    ],
    ids=["300 of 4096", "about 300 of 4096", "1000 of 30000", "about 1000 of 30000"],
)
def test_honest_clients_with_a_large_max_tokens_get_their_limit_and_no_more(
    at_once: int, max_tokens: int, median: int, spread: float, lasts: Callable[[int], float], streamed: bool
):
    rng = random.Random(7)
    completion = lambda: max(1, int(median * rng.lognormvariate(0, spread)))  # noqa: E731
    clients = Clients(at_once, max_tokens, completion, lasts, streamed=streamed)
    clients.run(minutes=10)
    assert clients.used >= 0.9 * 10 * LIMIT.value
    assert clients.cut <= 0.01 * clients.ended
    assert clients.calls <= 3 * clients.ended


def test_what_is_expected_follows_a_tenants_completions_and_no_others():
    expectations = Expectations()
    for _ in range(100):
        expectations.learn("a", "m", 100, 0)
        expectations.learn("b", "m", 5000, 0)
    assert expectations.expect("a", "m") <= 130 + MARGIN
    assert expectations.expect("b", "m") >= 4000
    assert expectations.expect("a", "other") == expectations.expect("c", "m")


def test_a_tenants_mixtures_displace_no_other_tenants_expectations():
    expectations = Expectations()
    for _ in range(100):
        expectations.learn("quiet", "m", 5000, 0)
    before = expectations.expect("quiet", "m")
    for number in range(growing_hold.KNOWN + 1):
        expectations.learn("many", f"mixture {number}", 1, 0)
    assert expectations.expect("quiet", "m") == before >= 4000


def test_new_requests_leave_room_for_streams_to_grow(client: redis.Redis):
    script = Script(client)
    for number in range(100):
        if not script.acquire(f"r{number}", [LIMIT], 0, 30_000, 30_000, FREE, expected=1000)[0]:
            break
    assert number == 45
    assert script.grow("r0", 1000, 15_000) == (16_000, 0, "")


def test_a_record_without_a_hold_holds_its_whole_reservation(client: redis.Redis):
    """Write the record as gateways of the release before do."""
    script = Script(client)
    state, leases, held, *_ = script.keys
    record = {"v": 2, "tokens": 50_000, "completion": 50_000, "cost": 0, "note": "{}", "at": script.now}
    client.hset(held, "old", msgspec.msgpack.encode({**record, "limits": [LIMIT.field, LIMIT.value]}))
    client.hset(state, LIMIT.field + "#", 50_000)
    client.zadd(leases, {"old": script.now // 1000 + 10**9})
    assert script.extend("old", 10_000) == []
    assert script.acquire("a", [LIMIT], 0, 10_000, 10_000, FREE)[0]
    assert not script.acquire("b", [LIMIT], 0, 1, 1, FREE)[0]
    script.now += 10 * SECOND
    assert script.settle("old", 10_000, 0, True)
    # The 10,000 that it used are paid off, and the rest is free.
    assert script.acquire("c", [LIMIT], 0, 50_000, 50_000, FREE)[0]
    assert not script.acquire("d", [LIMIT], 0, 1, 1, FREE)[0]


def test_a_stream_that_is_put_back_holds_and_owes_what_it_did(client: redis.Redis):
    script, limit = Script(client), Limit("tenant:t", "tenant", "t", 1000)
    put_back = ("restore", 10**9, "r", script.now, 900, 900, 0, 300, 200, "{}", limit.field, limit.value)
    assert script.call(*put_back) == 1
    assert script.call(*put_back) == 0
    # The debt of 200 was lost with the data.
    assert not script.acquire("a", [limit], 0, 701, 701, FREE)[0]
    assert script.grow("r", 250, 0) == (500, 0, "")
    assert script.settle("r", 400, 0, True)
    # 200 of the 400 used tokens are still owed.
    assert script.acquire("a", [limit], 0, 800, 800, FREE)[0]
    assert not script.acquire("b", [limit], 0, 1, 1, FREE)[0]


def test_use_that_the_ledger_brings_is_held_and_not_owed(client: redis.Redis):
    script, limit = Script(client), Limit("tenant:d", "tenant", "d", 1000)
    assert script.acquire("r", [limit], 0, 900, 900, FREE, expected=100)[0]
    # The state is lost and backfilled from the ledger, which has no row of this request yet.
    client.hdel(script.keys[0], limit.field)
    script.now += SECOND
    assert script.acquire("other", [limit], 0, 1, 1, FREE)[0]
    assert script.grow("r", 100, 200) == (300, 0, "")
    assert not script.acquire("a", [limit], 0, 700, 700, FREE)[0]
    assert script.settle("r", 300, 0, True)
    assert script.acquire("a", [limit], 0, 999, 999, FREE)[0]


@pytest.mark.parametrize("made", ["script", "twin"])
def test_a_refund_of_what_was_charged_early_is_what_is_not_paid_off(client: redis.Redis, made: str):
    limit = Limit("tenant:t", "tenant", "t", 60)
    script, twin = Script(client), LocalLimits()
    script.acquire("r", [limit], 0, 60, 60, FREE, expected=40)
    twin.acquire([limit], demand("r", 0, 60, 60, FREE, 40), START)
    script.grow("r", 40, 0)
    twin.grow("", "r", 40, 0, 0, START)
    script.now += 30 * SECOND
    if made == "script":
        script.settle("r", 0, 0, True)
        _, _, [(remaining, *_)] = script.acquire("a", [limit], 0, 1, 1, FREE)
    else:
        twin.settle("", "r", 0, 0, counts=True, now=script.now)
        [(remaining, *_)] = twin.acquire([limit], demand("a", 0, 1, 1, FREE), script.now).states
    assert remaining == 59


def test_a_pace_asks_before_it_needs_more_and_again_after_a_while():
    pace = Pace(10, 100, 1000, 1)
    pace.used = 110 - MARGIN
    assert pace.wanted(0.0) == 0
    pace.used += 1
    assert pace.wanted(0.0) == 128
    pace.grown(Grown(110, 700, "tenant:t"), 0.0)
    assert pace.wanted(0.4) == 0
    assert pace.wanted(0.6) == 128
    pace.used = 111
    assert pace.is_used_up
    pace.grown(Grown(1000, 0, ""), 1.0)
    assert not pace.is_used_up
    pace.used = 990
    assert pace.wanted(2.0) == 0


async def grown_until_full(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, how: str, *, stream: bool = True
) -> Any:
    """An answer of up to 200 tokens that holds 65 of them at first, of a tenant whose other request holds all but 23 of
    the window. Return it, the tenant and its engine's counts."""
    monkeypatch.setattr(growing_hold, "FIRST", 1.0)
    tenant = await gateway.tenant("acme", tokens_per_minute=300, on_token_limit=how)
    upstream.paused = True
    options = {"stream_options": {"include_usage": True}} if stream else {}
    long = {"tokens": 200, "pause": True, "delay": 0.002}
    answer = asyncio.create_task(tenant.chat(stream=stream, max_tokens=200, x_engine=long, **options))
    await until(lambda: asyncio.sleep(0, any(each["completion_tokens"] for each in upstream.finished.values())))
    monkeypatch.setattr(growing_hold, "FIRST", 1000.0)
    other = asyncio.create_task(tenant.chat(max_tokens=190, x_engine={"tokens": 190, "delay": 60}))
    await until(lambda: asyncio.sleep(0, len(upstream.requests) == 2))
    upstream.paused = False
    got = await answer
    other.cancel()

    async def written() -> bool:
        data = await tenant.usage()
        return bool(data) and data[0]["requests"] == 2

    await until(written)
    return got, tenant, next(each for each in upstream.finished.values() if each["completion_tokens"])


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("keeps_allowances", [True, False], ids=["kept", "counted here"])
async def test_a_stream_without_room_to_grow_ends_with_an_error(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, keeps_allowances: bool
):
    upstream.keeps_allowances = keeps_allowances
    async with serve() as gateway:
        got, tenant, made = await grown_until_full(gateway, upstream, monkeypatch, "refuse")
        *before, last = got.events
        assert last["error"]["code"] == "rate_limit_exceeded"
        assert last["error"]["type"] == "tokens"
        assert "Try again in " in last["error"]["message"]
        # The 23 were granted, and what came back since; nothing beyond the hold was delivered.
        assert 64 <= len(text_of(before)) <= 150
        # Billed is what the engine made, which is closed.
        assert made["finish_reason"] == ("length" if keeps_allowances else "abort")
        [used] = await tenant.usage()
        assert len(text_of(before)) < used["completion_tokens"] == made["completion_tokens"] < 200
        assert 'status="limited"' in (await gateway.admin.get("/metrics")).body.decode()


@pytest.mark.parametrize("keeps_allowances", [True, False], ids=["kept", "counted here"])
async def test_a_stream_without_room_to_grow_is_shortened(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, keeps_allowances: bool
):
    upstream.keeps_allowances = keeps_allowances
    async with serve() as gateway:
        got, tenant, made = await grown_until_full(gateway, upstream, monkeypatch, "shorten")
        *before, last, usage, done = got.events
        assert done == "[DONE]"
        assert [choice["finish_reason"] for choice in last["choices"]] == ["length"]
        assert 64 <= len(text_of(before)) <= 150
        [used] = await tenant.usage()
        assert usage["usage"]["completion_tokens"] == used["completion_tokens"] == made["completion_tokens"] < 200


def calls_of_streams(monitor: redis.client.Monitor, client: redis.Redis) -> list[str]:
    """Return the requests' calls of the quota script, without the gateway's sweeps and extensions of leases."""
    client.echo("the end")
    commands = iter(lambda: monitor.next_command()["command"], "ECHO the end")
    return [command for command in commands if re.search(r"^EVALSHA .* (acquire|grow|settle) ", command)]


async def test_a_stream_with_room_is_never_cut_and_asks_seldom(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, client: redis.Redis
):
    monkeypatch.setattr(growing_hold, "FIRST", 1.0)
    # An engine without any delay would end at its allowance.
    upstream.keeps_allowances = False
    async with serve() as gateway:
        tenant = await gateway.tenant("acme", tokens_per_minute=10_000)
        with client.monitor() as monitor:
            for _ in range(5):
                got = await tenant.chat(stream=True, max_tokens=240, x_engine={"tokens": 240})
                assert len(text_of(got.events)) == 240
            calls = calls_of_streams(monitor, client)
        # Each stream has 240 events and four calls: begin, two growths, end.
        assert 5 * 2 < len(calls) <= 5 * 5, calls
        got = await tenant.chat(max_tokens=1)
        remaining = int(got.headers["x-ratelimit-remaining-tokens"])
        # Nothing is held any more.
        assert remaining >= 10_000 - 5 * (240 + PROMPT_TOKENS) - (HI_TOKENS + 1)


async def test_whole_answers_hold_what_they_need(gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growing_hold, "FIRST", 1.0)
    # All of max_tokens would be held by two of them only.
    tenant = await gateway.tenant("acme", tokens_per_minute=700)
    asked = {"max_tokens": 240, "x_engine": {"tokens": 120, "delay": 0.005}}
    answers = await asyncio.gather(*(tenant.chat(**asked) for _ in range(4)))
    assert [answer.status for answer in answers] == [200] * 4
    for answer in answers:
        assert answer.json["usage"]["completion_tokens"] == 120
        assert answer.json["choices"][0]["finish_reason"] == "stop"
        assert "loraplex" not in answer.json
        assert answer.headers["x-loraplex-adapter-digest"] == "base"
    got = await tenant.chat(max_tokens=1)
    # Nothing is held any more.
    assert int(got.headers["x-ratelimit-remaining-tokens"]) >= 700 - 4 * (120 + PROMPT_TOKENS) - (HI_TOKENS + 1)
    assert {int(headers["x-loraplex-allowance"]) for headers, body in upstream.requests[:4]} == {65}


@pytest.mark.parametrize("how", ["refuse", "shorten"])
async def test_a_whole_answer_without_room_to_grow_is_shortened(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, how: str
):
    """Before, the client of a tenant whose requests are refused got a 429, and paid for tokens that it never got."""
    got, tenant, made = await grown_until_full(gateway, upstream, monkeypatch, how, stream=False)
    assert got.status == 200
    [choice] = got.json["choices"]
    assert choice["finish_reason"] == "length"
    assert got.headers[MAX_TOKENS_HEADER] == str(made["completion_tokens"])
    [used] = await tenant.usage()
    assert 65 <= len(choice["message"]["content"]) == used["completion_tokens"] == made["completion_tokens"] <= 150
    assert "loraplex_gateway_quota_refusals_total{" in (await gateway.admin.get("/metrics")).body.decode()


async def test_an_engine_that_leaves_within_a_report_has_not_begun_to_answer(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(growing_hold, "FIRST", 1.0)
    tenant = await gateway.tenant("acme", tokens_per_minute=10_000)
    got = await tenant.chat(max_tokens=240, x_engine={"tokens": 120, "drop_after": 50})
    assert got.status in (502, 503)

    async def is_billed() -> bool:
        rows = await tenant.usage()
        return bool(rows) and rows[0]["completion_tokens"] == 50

    await until(is_billed)

    async def serves_again() -> bool:
        return (await tenant.chat(max_tokens=240, x_engine={"tokens": 120})).status == 200

    await until(serves_again)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_max_tokens_above_the_whole_limit_is_no_reason_to_refuse(
    gateway: Gateway, upstream: Upstream, stream: bool
):
    tenant = await gateway.tenant("acme", tokens_per_minute=100, tokens_per_day=100)
    # The first request is charged only the tokens that it used, so there is room for the second.
    for tokens in (10, 60):
        got = await tenant.chat(stream=stream, max_tokens=240, x_engine={"tokens": tokens, "delay": 0.005})
        assert got.status == 200
        made = len(text_of(got.events)) if stream else got.json["usage"]["completion_tokens"]
        assert made == tokens
    # The second request held its prompt, and half of the room above it, at first.
    held = HI_TOKENS + (100 - HI_TOKENS) // 2
    assert int(got.headers["x-ratelimit-remaining-tokens"]) == 100 - (10 + PROMPT_TOKENS) - held


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_prompt_above_half_of_the_limit_leaves_the_rest_for_the_answer(
    gateway: Gateway, upstream: Upstream, stream: bool
):
    tenant = await gateway.tenant("acme", tokens_per_minute=200)
    engine = {"tokens": 60, "delay": 0.01}
    got = await tenant.complete(prompt=[5] * 120, stream=stream, max_tokens=130, x_engine=engine)
    assert got.status == 200, got.body
    [made] = upstream.finished.values()
    assert made["completion_tokens"] == 60


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("how", ["refuse", "shorten"])
async def test_it_ends_when_the_limit_is_used_up(gateway: Gateway, upstream: Upstream, stream: bool, how: str):
    tenant = await gateway.tenant("acme", tokens_per_day=100, on_token_limit=how)
    got = await tenant.chat(stream=stream, max_tokens=240, x_engine={"tokens": 240, "delay": 0.005})
    [made] = upstream.finished.values()
    assert made["completion_tokens"] == 100 - HI_TOKENS
    if stream and how == "refuse":
        assert got.events[-1]["error"]["code"] == "rate_limit_exceeded"
        return
    assert "length" in str(got.events if stream else got.json)


async def test_a_whole_answer_of_an_engine_without_allowances_needs_all_of_max_tokens(serve: Any, upstream: Upstream):
    upstream.keeps_allowances = False
    async with serve() as gateway:
        tenant = await gateway.tenant("acme", tokens_per_minute=100)
        refused = await tenant.chat(max_tokens=240, x_engine={"tokens": 60})
        assert (refused.status, refused.json["error"]["code"]) == (400, "request_exceeds_limit")
        assert "Non-streaming requests to this model reserve all of max_tokens." in refused.json["error"]["message"]
        got = await tenant.chat(stream=True, max_tokens=240, x_engine={"tokens": 60, "delay": 0.005})
        assert len(text_of(got.events)) == 60


async def test_a_prompt_above_the_limit_can_never_be_admitted(gateway: Gateway):
    tenant = await gateway.tenant("acme", tokens_per_minute=5)
    refused = await tenant.chat(stream=True, max_tokens=10)
    assert (refused.status, refused.json["error"]["code"]) == (400, "request_exceeds_limit")
    assert "stream it" not in refused.json["error"]["message"]
