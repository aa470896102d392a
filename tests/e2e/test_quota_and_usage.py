"""Quotas, usage rows, and the effect of a client's disconnection on both."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiohttp
import pytest

from testing.stack import Answer, Stack, Tenant, http


def admin(demo: dict, method: str, path: str, body: dict | None = None) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    return http(method, f"{demo['gateway']}/admin/api/{path}", demo["admin_key"], data)


def new_tenant(demo: dict, name: str, **limits: int) -> Tenant:
    assert admin(demo, "POST", "tenants", {"name": name} | limits).status in (200, 201)
    key = admin(demo, "POST", f"tenants/{name}/keys").json["key"]
    return Tenant(name, key, (), demo["gateway"])


def test_an_exhausted_quota_is_429_and_says_when(demo: dict):
    import openai

    tenant = new_tenant(demo, "two-a-minute", requests_per_minute=2)
    first = tenant.client.with_raw_response.chat.completions.create(
        model=demo["base_model"], messages=[{"role": "user", "content": "Hi"}], max_tokens=2
    )
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    tenant.ask(demo["base_model"], "Hi", max_tokens=2)
    with pytest.raises(openai.RateLimitError) as refused:
        tenant.ask(demo["base_model"], "Hi", max_tokens=2)
    headers = refused.value.response.headers
    assert 0 < float(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-reset-requests" in headers
    assert refused.value.code == "rate_limit_exceeded"


def test_a_token_quota_counts_prompt_and_answer(demo: dict):
    import openai

    tenant = new_tenant(demo, "few-tokens", tokens_per_minute=120)
    tenant.ask(demo["base_model"], "Count to one hundred.", max_tokens=48, extra_body={"ignore_eos": True})
    with pytest.raises(openai.RateLimitError) as refused:
        tenant.ask(demo["base_model"], "Count to one hundred.", max_tokens=48, extra_body={"ignore_eos": True})
    assert refused.value.response.headers["x-ratelimit-limit-tokens"] == "120"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
async def test_a_shortened_answer_ends_at_its_length_and_costs_what_it_was(endpoint: str, stream: bool, demo: dict):
    """A request for more tokens than the tenant may hold gets two shortened answers and pays for their length."""
    limit, choices = 80, 2
    name = f"short-{endpoint.replace('/', '-')}-{stream}".lower()
    tenant = new_tenant(demo, name, max_concurrent_tokens=limit, on_token_limit="shorten")
    question = "Count to one thousand."
    asked = {"messages": [{"role": "user", "content": question}]} if "chat" in endpoint else {"prompt": question}
    body = {"model": demo["base_model"], "max_tokens": 300, "n": choices, "ignore_eos": True, "stream": stream, **asked}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {tenant.key}"}) as session,
        session.post(f"{tenant.url}/v1/{endpoint}", json=body) as response,
    ):
        assert response.status == 200
        each = int(response.headers["x-loraplex-max-tokens"])
        text = (await response.read()).decode()
    parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    reasons = {choice["index"]: choice["finish_reason"] for part in parts for choice in part["choices"]}
    assert reasons == dict.fromkeys(range(choices), "length")
    usage = parts[-1]["usage"]
    assert usage["completion_tokens"] == choices * each
    # The whole allowance, except the remainder of its division among the answers.
    assert 0 <= limit - usage["prompt_tokens"] - choices * each < choices
    await until(lambda: asyncio.to_thread(usage_by_model, tenant))
    row = usage_by_model(tenant)[demo["base_model"]]
    assert {name: row[name] for name in ("requests", "prompt_tokens", "completion_tokens")} == {
        "requests": 1,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }


async def until(condition: Callable[[], Awaitable[object]], seconds: float = 60) -> None:
    """Wait for an effect after the response: usage rows are written in batches, and a cancellation takes a step."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def usage_by_model(tenant: Tenant) -> dict[str, dict]:
    return {row["model"]: row for row in http("GET", f"{tenant.url}/v1/usage", tenant.key).json["data"]}


def usage_of_key(tenant: Tenant) -> dict[str, dict]:
    """Return the usage by model of the tenant's key alone."""
    rows = http("GET", f"{tenant.url}/v1/usage?group_by=key,model", tenant.key).json["data"]
    return {row["model"]: row for row in rows if row["key_id"] == tenant.key.split("_")[1]}


IDLE_GAUGES = ("requests_running", "requests_waiting", "kv_blocks_used")


async def test_usage_adds_up_to_what_32_clients_received(acme: Tenant, globex: Tenant, demo: dict):
    """Usage equals what 32 clients received from three adapters of two tenants, streamed and not, of many lengths."""
    # Keys of their own, because rows of earlier tests may follow.
    acme, globex = (
        replace(tenant, key=admin(demo, "POST", f"tenants/{tenant.name}/keys").json["key"]) for tenant in (acme, globex)
    )
    work = [(acme, acme.models[0]), (acme, acme.models[1]), (globex, globex.models[0])]

    async def one(index: int) -> tuple[str, int, int]:
        tenant, model = work[index % 3]
        async with tenant.aclient as client:
            ask = {
                "model": model,
                "messages": [{"role": "user", "content": f"Number {index}: say something about it."}],
                "temperature": 0.7,
                "seed": index,
                "max_tokens": 4 + index,
            }
            if index % 2:
                stream = await client.chat.completions.create(
                    **ask, stream=True, stream_options={"include_usage": True}
                )
                usage = [chunk.usage async for chunk in stream][-1]
            else:
                usage = (await client.chat.completions.create(**ask)).usage
        assert usage is not None
        return model, usage.prompt_tokens, usage.completion_tokens

    received = await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(32))), 120)
    for tenant in (acme, globex):
        mine = [row for row in received if row[0] in tenant.models]
        expected = [
            {m: sum(row[column] for row in mine if row[0] == m) for m in {row[0] for row in mine}} for column in (1, 2)
        ]

        async def settled(tenant: Tenant = tenant, expected: list[dict[str, int]] = expected) -> bool:
            rows = await asyncio.to_thread(usage_of_key, tenant)
            return expected == [
                {model: row[f"{kind}_tokens"] for model, row in rows.items()} for kind in ("prompt", "completion")
            ]

        await until(settled)
        assert sum(row["requests"] for row in usage_of_key(tenant).values()) == len(mine)


async def test_a_client_that_leaves_frees_the_engine_and_pays_for_what_was_made(stack: Stack, demo: dict):
    tenant = new_tenant(demo, "leaver")
    body = {
        "model": demo["base_model"],
        "messages": [{"role": "user", "content": "Write a very long story."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    [engine] = admin(demo, "GET", "engines").json["data"]

    async def idle() -> bool:
        metrics = (await asyncio.to_thread(http, "GET", f"{engine['url']}/metrics")).body.decode()
        return all(f"loraplex_engine_{gauge} 0.0" in metrics for gauge in IDLE_GAUGES)

    pieces = 0
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {tenant.key}"}) as session,
        session.post(f"{tenant.url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        async for line in response.content:
            pieces += line.startswith(b"data:")
            if pieces == 10:
                break
        assert not await idle()

    await until(idle)
    await until(lambda: asyncio.to_thread(usage_by_model, tenant))
    row = usage_by_model(tenant)[demo["base_model"]]
    assert row["requests"] == 1
    assert 9 <= row["completion_tokens"] < 1000
