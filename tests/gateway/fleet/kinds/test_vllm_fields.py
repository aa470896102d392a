"""The allow-list before vLLM: the fields that a tenant may send, at every depth."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.fleet.kinds.fields import CHAT_PATH, DROPPED, RENDERERS_OWN, cache_salt, check_fields
from gateway.fleet.kinds.vllm import VllmFields, request_body
from testing.gateway.running import HI, Gateway, running, settings
from testing.gateway.upstream import TOKEN
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.fleet.kinds.test_vllm import adapters, served
from wire.decoding import decode
from wire.errors import BadRequest
from wire.requests import ChatCompletionRequest, CompletionRequest

# Fields that vLLM 0.32 accepts and a tenant must not send. Some are known to our engine, which does not serve them.
OPERATORS_OWN: dict[str, Any] = {
    "kv_transfer_params": {"prompt_token_ids": [1, 2, 3], "remote_host": "10.0.0.1", "remote_port": 1},
    "ec_transfer_params": {"a": 1},
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"image": {}},
    "prompt_embeds": "AAAA",
    "logprob_token_ids": [1],
    "documents": [{"text": "a"}],
    "stream_interval": 1000,
    "request_id": "another's",
    "chat_template": "{{ messages }}",
    "reasoning_effort": "low",
    "truncate_prompt_tokens": 1,
    "cache_hit_threshold": 1.0,
    "a_field_of_tomorrow": {"a": 1},
}


def sent(body: dict[str, Any], path: str = CHAT_PATH) -> dict[str, Any]:
    kind = ChatCompletionRequest if path == CHAT_PATH else CompletionRequest
    body = {"model": "m", **({"messages": HI} if kind is ChatCompletionRequest else {"prompt": "Hi"}), **body}
    raw = json.dumps(body).encode()
    decode(kind, check_fields(raw, kind, (VllmFields,)))
    return request_body(msgspec.json.decode(raw), path, "acme", None)


async def test_what_is_the_operators_own_is_refused_by_name_and_costs_nothing(
    vllm_gateway: tuple[Gateway, VllmDouble],
):
    gateway, vllm = vllm_gateway
    acme = await gateway.tenant("acme")
    for name, value in OPERATORS_OWN.items():
        for streamed in (False, True):
            field = {name: value, "stream": streamed}
            for got in (await acme.chat(**field), await acme.complete(**field)):
                assert (got.status, got.error["param"], got.error["code"]) == (400, name, "unsupported_parameter")
    assert vllm.requests == []
    assert await acme.usage() == []


@pytest.fixture
async def vllm_gateway(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
) -> AsyncIterator[tuple[Gateway, VllmDouble]]:
    async with served(tmp_path, model_dir, redis_url, migrated) as pair:
        yield pair


async def test_only_declared_fields_are_sent_at_every_depth(vllm_gateway: tuple[Gateway, VllmDouble]):
    gateway, vllm = vllm_gateway
    acme = await gateway.tenant("deep")
    part = {"type": "text", "text": "Hi", "uuid": "x", "image_url": {"url": "http://169.254.169.254/"}}
    message = {"role": "user", "content": [part], "audio": {"id": "x"}, "prefix": True}
    got = await acme.chat(
        messages=[message],
        stream=True,
        stream_options={"include_usage": False, "stream_interval": 9},
        max_tokens=2,
        kv_transfer_params=None,
        use_beam_search=False,
        metadata={"a": "b"},
        include_reasoning=False,
    )
    assert got.status == 200, got.body
    body = vllm.requests.pop()[1]
    assert body.pop("cache_salt")
    assert body == {
        "model": "base",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 2,
        "include_reasoning": False,
    }


async def test_a_vllm_server_that_announced_itself_gets_no_more(tmp_path: Path, model_dir: Path, redis_url: str):
    """The gateway lists no vLLM server, so requests are refused only after the choice of an engine."""
    async with VllmDouble(api_key="").serving() as vllm:
        of = settings(tmp_path, model_dir, ["announced"], redis_url)
        async with running(of) as gateway:
            headers = {"x-loraplex-internal-token": TOKEN}
            body = {"url": f"vllm+{vllm.url}"}
            assert (await gateway.nobody.post("/internal/engines", body, headers=headers)).status == 204
            acme = await gateway.tenant("acme")
            await gateway.engines_up(1)
            got = await acme.complete(a_field_of_tomorrow=1)
            assert (got.status, got.error["param"], got.error["code"]) == (
                400,
                "a_field_of_tomorrow",
                "unsupported_parameter",
            )
            assert (await acme.complete(max_tokens=2)).status == 200
            # The server has no API key, and the internal token opens our own engines only.
            [(shown, _)] = vllm.requests
            assert "authorization" not in shown
            assert TOKEN not in str(shown)


def test_tools_are_sent_as_declared_with_their_schemas_whole():
    schema = {"type": "object", "properties": {"kv_transfer_params": None}}
    function = {"name": "f", "parameters": schema}
    tool = {"type": "function", "function": function | {"y": 1}, "z": 1}
    choice = {"type": "function", "function": {"name": "f", "x": 1}}
    body = sent({"tools": [tool], "tool_choice": choice})
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}


def test_hints_are_dropped_and_our_own_words_of_forms_translated():
    assert not (sent(dict.fromkeys(DROPPED, 1)).keys() & DROPPED)
    assert sent({"guided_regex": "a+"})["structured_outputs"] == {"regex": "a+"}
    assert "guided_json" not in sent({"guided_json": {"type": "object"}}, "/v1/completions")
    assert sent({"thinking_token_budget": 5})["thinking_token_budget"] == 5
    with pytest.raises(BadRequest, match="thinking_token_budget"):
        sent({"thinking_token_budget": "all"})


@pytest.mark.parametrize("name", sorted(RENDERERS_OWN))
def test_chat_template_kwargs_are_the_templates_variables_only(name: str):
    with pytest.raises(BadRequest) as refused:
        sent({"chat_template_kwargs": {name: True}})
    assert refused.value.param == "chat_template_kwargs"
    assert sent({"chat_template_kwargs": {"enable_thinking": True}})["chat_template_kwargs"] == {
        "enable_thinking": True
    }


def test_a_client_cannot_make_several_sequences_count_as_one():
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert sent(options)["stream_options"]["continuous_usage_stats"] is True
    assert sent(options | {"n": 2})["stream_options"]["continuous_usage_stats"] is False


def test_what_has_no_declared_members_is_not_walked_through():
    """Values without declared members are not walked through: 8 MiB may hold a million, and a walk took seconds."""
    deep: Any = 1
    for _ in range(5000):
        deep = {"a": [deep]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": deep}}}
    body = {"messages": HI, "model": "m", "chat_template_kwargs": {"x": deep}, "tools": [tool]}
    sent = request_body(body, CHAT_PATH, "acme", None)
    assert sent["chat_template_kwargs"] is body["chat_template_kwargs"]
    assert sent["tools"][0]["function"]["parameters"] is tool["function"]["parameters"]
    prompt = [[1, 2], [3]]
    assert request_body({"prompt": prompt, "model": "m"}, "/v1/completions", "acme", None)["prompt"] is prompt


async def test_a_long_conversation_is_sent_whole(vllm_gateway: tuple[Gateway, VllmDouble], monkeypatch):
    monkeypatch.setattr("gateway.fleet.kinds.foreign.INLINE_TOKENS", 1)
    gateway, vllm = vllm_gateway
    acme = await gateway.tenant("long")
    messages = [{"role": "user", "content": str(number)} for number in range(20)]
    assert (await acme.chat(messages=messages, max_tokens=1)).status == 200
    assert vllm.requests[-1][1]["messages"] == messages


def test_salts_differ_by_tenant_adapter_and_the_clients_own_and_have_one_length():
    salts = [
        cache_salt(tenant, digest, own)
        for tenant in ("a", "b")
        for digest in (None, "0" * 64, "1" * 64)
        for own in (None, "x", "y" * 1024, "\ud800")
    ]
    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts} == {64}


async def test_each_adapter_of_a_tenant_has_a_salt_of_its_own(vllm_gateway: tuple[Gateway, VllmDouble]):
    gateway, vllm = vllm_gateway
    salted = await gateway.tenant("salted")
    vllm.requests.clear()
    names = await adapters(salted, 2)
    for model in ("base", *names):
        for own in ({}, {"cache_salt": "mine"}, {"cache_salt": "m" * 1024}):
            assert (await salted.complete(model=model, max_tokens=1, **own)).status == 200
    salts = [body["cache_salt"] for _, body in vllm.requests]
    assert len(set(salts)) == len(salts) == 9
    assert (await salted.complete(model=names[0], max_tokens=1)).status == 200
    assert vllm.requests[-1][1]["cache_salt"] == salts[3]
