"""The proxying of inference requests: the request to the engine, the answer to the client, the usage row."""

import asyncio
import re
from typing import Any

import pytest
from msgspec import Raw

from gateway.api.inference.events import visible_event
from testing.gateway.running import BASE_MODEL, HI_TOKENS, Client, Gateway, until
from testing.gateway.upstream import TOKEN, Upstream
from testing.gateway.upstream_bodies import CACHED_TOKENS, PROMPT_TOKENS


@pytest.fixture
async def tenant(gateway: Gateway) -> Client:
    return await gateway.tenant("acme")


async def rows(client: Client, count: int = 1) -> dict[str, Any]:
    """Return the sums of the one model used, once `count` requests are recorded."""

    async def written() -> bool:
        data = await client.usage()
        return bool(data) and data[0]["requests"] == count

    await until(written)
    return (await client.usage())[0]


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_a_whole_answer(route: str, tenant: Client, upstream: Upstream):
    got = await getattr(tenant, route)(max_tokens=7, user="u1", x_engine={"tokens": 4})
    assert got.status == 200
    assert got.json["model"] == BASE_MODEL
    assert got.json["usage"]["completion_tokens"] == 4
    assert got.headers["x-request-id"].startswith("req_")
    [(headers, body)] = upstream.requests
    assert body["model"] == BASE_MODEL
    assert body["user"] == "u1"
    assert body["max_tokens"] == 7
    assert headers["x-loraplex-internal-token"] == TOKEN
    assert headers["x-loraplex-weight"] == "1.0"
    assert len(headers["x-loraplex-tenant"]) == 32
    assert headers["x-request-id"] == got.headers["x-request-id"]
    used = await rows(tenant)
    assert used == {
        "tenant": "acme",
        "model": BASE_MODEL,
        "requests": 1,
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 4,
        "cached_tokens": CACHED_TOKENS,
        "cost": "0.00",
        "cost_micros": 0,
    }


async def test_the_engine_gets_the_tenants_target_and_no_clients(gateway: Gateway, upstream: Upstream):
    eager, usual = await gateway.tenant("eager", ttft_target=0.5), await gateway.tenant("usual")
    forged = {"x-loraplex-ttft-target": "0.001"}
    for client in (eager, usual):
        assert (
            await client.post("/v1/completions", {"model": BASE_MODEL, "prompt": "Hi"}, headers=forged)
        ).status == 200
    assert [headers.get("x-loraplex-ttft-target") for headers, _ in upstream.requests] == ["0.5", None]
    wrong = await gateway.admin.call("PATCH", "/admin/api/tenants/eager", json={"ttft_target": 0})
    assert (wrong.status, wrong.error["param"]) == (400, "ttft_target")


@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_the_end_of_an_answer_has_the_slot_back(stream: bool, gateway: Gateway):
    """The slot is free at the end of an answer, although the answer does not wait for its settlement."""
    one_at_a_time = await gateway.tenant("acme", max_concurrent=1)
    for _ in range(30):
        assert (await one_at_a_time.chat(stream=stream)).status == 200
    assert (await rows(one_at_a_time, 30))["requests"] == 30


async def test_a_clients_request_id_is_not_ours(tenant: Client):
    ids = [(await tenant.post("/v1/completions", {}, headers={"x-request-id": "mine"})).headers["x-request-id"]]
    ids.append((await tenant.complete()).headers["x-request-id"])
    assert "mine" not in ids
    assert len(set(ids)) == 2


@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize("asked", [True, False])
async def test_a_stream(asked: bool, route: str, tenant: Client, upstream: Upstream):
    options = {"stream_options": {"include_usage": True}} if asked else {}
    got = await getattr(tenant, route)(stream=True, max_tokens=9, x_engine={"tokens": 5}, **options)
    assert got.status == 200
    assert got.headers["content-type"].startswith("text/event-stream")
    *events, done = got.events
    assert done == "[DONE]"
    assert all("loraplex" not in event and event["model"] == BASE_MODEL for event in events)
    if asked:
        assert events.pop()["usage"]["completion_tokens"] == 5
        assert all(event["usage"] is None for event in events)
    else:
        assert all("usage" not in event for event in events)
    assert len(events) == 5
    assert all(event["choices"] for event in events)
    assert upstream.requests[0][1]["stream_options"]["include_usage"] is True
    used = await rows(tenant)
    assert (used["prompt_tokens"], used["completion_tokens"], used["cached_tokens"]) == (
        PROMPT_TOKENS,
        5,
        CACHED_TOKENS,
    )


async def test_an_event_arrives_when_it_is_made(tenant: Client):
    how = {"tokens": 60, "delay": 0.5}
    body = {"model": BASE_MODEL, "prompt": "Hi", "stream": True, "max_tokens": 60, "x_engine": how}
    started = asyncio.get_running_loop().time()
    async with tenant.session.post(f"{tenant.url}/v1/completions", json=body, headers=tenant.headers) as response:
        await response.content.readuntil(b"\n\n")
        assert asyncio.get_running_loop().time() - started < 20  # of the 30 s that all of them take


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_engine_and_is_written_down(
    stream: bool, gateway: Gateway, upstream: Upstream
):
    tenant = await gateway.tenant("leaver", max_concurrent=1, tokens_per_minute=200)
    body = {"model": BASE_MODEL, "prompt": "Hi", "stream": stream, "max_tokens": 100}
    body["x_engine"] = {"tokens": 100, "delay": 0.1}
    url = f"{tenant.url}/v1/completions"
    # A separate session, so that leaving it closes the connection.
    request = asyncio.ensure_future(tenant.session.post(url, json=body, headers=tenant.headers))
    if stream:
        response = await request
        for _ in range(4):
            await response.content.readuntil(b"\n\n")
        response.close()
    else:
        await until(lambda: _true(upstream.requests))
        request.cancel()
        await asyncio.wait({request})

    # Without it the engine would end by itself after ten seconds, not cancelled.
    await until(lambda: _true(upstream.cancelled))
    used = await rows(tenant)
    # The engine's count, not the number of tokens that reached the client.
    [done] = upstream.finished.values()
    assert done["completion_tokens"] < 100
    assert used["completion_tokens"] == done["completion_tokens"]
    assert used["prompt_tokens"] == PROMPT_TOKENS
    assert await _statuses(gateway) == ["cancelled"]
    # The slot is free again, and the unused part of the reservation is refunded.
    again = await tenant.complete(max_tokens=100)
    assert again.status == 200


async def test_each_event_may_hold_more_than_one_token(gateway: Gateway, upstream: Upstream):
    tenant = await gateway.tenant("batches")
    body = {"model": BASE_MODEL, "prompt": "Hi", "stream": True, "max_tokens": 200}
    body["x_engine"] = {"tokens": 200, "per_event": 10, "delay": 0.05}
    async with tenant.session.post(f"{tenant.url}/v1/completions", json=body, headers=tenant.headers) as response:
        for _ in range(3):
            await response.content.readuntil(b"\n\n")
    used = await rows(tenant)
    assert used["completion_tokens"] % 10 == 0
    assert 30 <= used["completion_tokens"] < 200


async def test_an_engine_without_our_extension(tenant: Client, upstream: Upstream):
    upstream.says_progress = False
    got = await tenant.chat(stream=True, max_tokens=9, x_engine={"tokens": 5})
    assert len(got.events) == 6
    assert (await rows(tenant))["completion_tokens"] == 5


@pytest.mark.parametrize(("how", "message"), [("fail_after", "The engine failed;"), ("drop_after", "connection")])
async def test_an_error_in_a_stream_is_an_event(how: str, message: str, tenant: Client, gateway: Gateway):
    got = await tenant.complete(stream=True, max_tokens=9, x_engine={"tokens": 8, how: 3})
    assert got.status == 200
    *events, last = got.events
    assert len(events) == 3
    assert message in last["error"]["message"]
    assert not re.search("luck|Error", last["error"]["message"])
    assert (await rows(tenant))["completion_tokens"] == 3
    assert await _statuses(gateway) == ["error"]


@pytest.mark.parametrize(
    ("theirs", "ours"), [(400, 400), (422, 400), (401, 502), (404, 502), (429, 503), (500, 502), (503, 503)]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_refuses(stream: bool, theirs: int, ours: int, tenant: Client):
    got = await tenant.complete(stream=stream, x_engine={"status": theirs})
    assert got.status == ours
    assert got.headers["content-type"].startswith("application/json")
    assert "sha256" not in got.error["message"]
    # The engine's message is passed on only if it is about the request.
    assert ("no: " in got.error["message"]) == (ours == 400)
    if ours == 503:
        assert got.headers["Retry-After"] == "1"
    if ours == 400:
        assert got.error["param"] == "prompt"
    # No tokens were generated, so nothing is charged; the request has a row all the same.
    used = await rows(tenant)
    assert (used["prompt_tokens"], used["completion_tokens"]) == (0, 0)


@pytest.mark.parametrize("theirs", [400, 422])
async def test_a_refusal_of_the_engine_costs_a_request_and_the_prompts_tokens(theirs: int, gateway: Gateway):
    """A refusal costs request and tokens but no money; the engine may have compiled a grammar or loaded an adapter."""
    await gateway.admin.call("PUT", "/admin/api/prices", json={"model": BASE_MODEL, "input": "1", "output": "1"})
    # "Hi" is 2 tokens: two refusals leave 96 of 100, and one request of three. No token of a day is regained.
    tenant = await gateway.tenant("once", requests_per_minute=3, tokens_per_day=100)
    for left in (98, 96):
        got = await tenant.complete(max_tokens=90, x_engine={"status": theirs})
        assert got.status == 400, got.body
        again = await tenant.complete(max_tokens=left - 1)
        assert (again.status, again.error["type"]) == (429, "tokens"), again.body
    assert (await tenant.complete(max_tokens=94)).status == 200
    assert (await tenant.complete(max_tokens=1)).error["type"] == "requests"
    used = await rows(tenant, 3)
    assert (used["prompt_tokens"], used["completion_tokens"]) == (PROMPT_TOKENS, 2)
    assert (await _statuses(gateway)).count("refused") == 2


async def test_an_engine_that_refuses_the_gateway_costs_the_tenant_nothing(gateway: Gateway):
    tenant = await gateway.tenant("once", requests_per_minute=1, tokens_per_minute=100)
    for _ in range(3):
        assert (await tenant.complete(max_tokens=90, x_engine={"status": 404})).status == 502
    assert (await tenant.complete(max_tokens=90)).status == 200
    assert (await rows(tenant, 4))["prompt_tokens"] == PROMPT_TOKENS


async def test_an_overloaded_engine_still_counts_the_request(gateway: Gateway):
    tenant = await gateway.tenant("once", requests_per_minute=1)
    assert (await tenant.complete(x_engine={"status": 503})).status == 503
    assert (await tenant.complete()).status == 429


async def test_the_default_of_max_tokens_is_said_to_the_engine(tenant: Client, upstream: Upstream):
    await tenant.chat()
    await tenant.complete()
    await tenant.chat(messages=[{"role": "user", "content": "x" * 230}])
    await tenant.chat(max_completion_tokens=5)
    assert [body.get("max_tokens") for _, body in upstream.requests[:3]] == [64, 16, 256 - 233]
    assert upstream.requests[3][1]["max_completion_tokens"] == 5


async def test_what_concerns_a_tenants_own_requests_is_passed_on(tenant: Client, upstream: Upstream):
    await tenant.complete(cache_salt="theirs", priority=-100, ttft_target=0.5)
    body = upstream.requests[0][1]
    # The engine adds the client's salt to the tenant's, which is in a header, and orders only the tenant's requests.
    assert (body["cache_salt"], body["priority"], body["ttft_target"]) == ("theirs", -100, 0.5)
    for wrong in ({"cache_salt": ""}, {"priority": 101}, {"priority": 0.5}, {"ttft_target": 0}, {"ttft_target": "1"}):
        refused = await tenant.complete(**wrong)
        assert (refused.status, refused.json["error"]["param"]) == (400, next(iter(wrong)))


async def test_the_prompt_is_counted_with_the_template(tenant: Client, upstream: Upstream):
    """The prompt takes 5 of 256 tokens of context: 251 are left, not 252."""
    assert (await tenant.chat(max_tokens=256 - HI_TOKENS)).status == 200
    over = await tenant.chat(max_tokens=256 - HI_TOKENS + 1)
    assert over.status == 400
    assert (over.error["code"], over.error["param"]) == ("context_length_exceeded", "messages")
    assert "256" in over.error["message"]
    assert "257" in over.error["message"]


async def test_prompts_and_choices_multiply(gateway: Gateway):
    """Two prompts of 2 tokens, three choices of 10 each: 4 + 60 are reserved."""
    enough = await gateway.tenant("enough", tokens_per_minute=64)
    assert (await enough.complete(prompt=["Hi", "Ho"], n=3, max_tokens=10)).status == 200
    short = await gateway.tenant("short", tokens_per_minute=63)
    got = await short.complete(prompt=["Hi", "Ho"], n=3, max_tokens=10)
    assert (got.status, got.error["code"]) == (400, "request_exceeds_limit")
    assert got.error["param"] == "max_tokens"


async def _true(value: Any) -> bool:
    return bool(value)


async def _statuses(gateway: Gateway) -> list[str]:
    """Return the statuses of the request log's admitted requests, the newest first."""
    return [row["status"] for row in (await gateway.admin.get("/admin/api/requests")).json["data"]]


def test_an_event_that_only_says_how_far_an_engine_is_goes_no_further():
    silent = {"choices": Raw(b"[]"), "loraplex": Raw(b'{"completion_tokens":3}')}
    head = {"id": Raw(b'"chatcmpl-1"'), "model": Raw(b'"m"')}
    assert visible_event(dict(silent), head, include_usage=True) is None
    assert visible_event(dict(silent), head, include_usage=False) is None
    usage = {"choices": Raw(b"[]"), "usage": Raw(b'{"completion_tokens":3}')}
    assert visible_event(dict(usage), head, include_usage=True) == usage | head
    assert visible_event(dict(usage), head, include_usage=False) is None
