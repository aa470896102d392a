"""The allow-list before SGLang: the fields that a tenant may send, at every depth."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.fleet.kinds.fields import CHAT_PATH, DROPPED, check_fields
from gateway.fleet.kinds.sglang import SERVED, request_body
from testing.gateway.running import HI, Gateway
from testing.gateway.sglang_double import CHAT, COMPLETION, SglangDouble
from tests.gateway.fleet.kinds.test_sglang import served
from wire.decoding import decode
from wire.errors import BadRequest
from wire.requests import ChatCompletionRequest, CompletionRequest

# Fields of SGLang 0.5.23 by which a tenant could reach other tenants, the server's process or its network.
DANGEROUS: dict[str, Any] = {
    "lora_path": "sha256-" + "0" * 64,
    "custom_logit_processor": '{"callable": "80049500000000"}',
    "custom_params": {"a": 1},
    "custom_labels": {"tenant": "another"},
    "session_id": "another's",
    "session_params": {"id": "another's", "rid": "another's"},
    "rid": "another's",
    "extra_key": "another's",
    "input_ids": [1, 2, 3],
    "input_embeds": [[0.1]],
    "return_hidden_states": True,
    "return_routed_experts": True,
    "routed_experts_start_len": 1,
    "return_cached_tokens_details": True,
    "return_spec_tokens_details": True,
    "return_prompt_token_ids": True,
    "return_meta_info": True,
    "return_sampling_mask": True,
    "return_input_ids_in_sglext": True,
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "routed_dp_rank": 1,
    "data_parallel_rank": 1,
    "disagg_prefill_dp_rank": 1,
    "ngram_corpus_id": "another's",
    "stop_regex": "(a+)+$",
    "regex": "(a|a)*",
    "ebnf": "root ::= root",
    "json_schema": "{}",
    "no_stop_trim": True,
    "images_config": {"a": 1},
    "video_config": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "max_dynamic_patch": 99,
    "min_dynamic_patch": 99,
    "use_audio_in_video": True,
    "watermark": {"key": "k"},
    "task": "action",
    "thinking": {"type": "adaptive"},
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "separate_reasoning": False,
    "stream_reasoning": False,
    "chat_template": "{{ messages }}",
    "a_field_of_tomorrow": {"a": 1},
}
# Fields of our own API that SGLang ignores or reads in another way.
IGNORED: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "include_stop_str_in_output": True,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "seed": 1,
}
CALLS = {"calls_tools": True, "keeps_seeds": True}


def sent(body: dict[str, Any], path: str = CHAT_PATH, reported: dict[str, Any] | None = None) -> dict[str, Any]:
    kind = ChatCompletionRequest if path == CHAT_PATH else CompletionRequest
    body = {"model": "m", **({"messages": HI} if kind is ChatCompletionRequest else {"prompt": "Hi"}), **body}
    raw = json.dumps(body).encode()
    decode(kind, check_fields(raw, kind, ()))
    made = request_body(msgspec.json.decode(raw), path, "acme", None, CALLS if reported is None else reported)
    assert made.keys() <= (CHAT if path == CHAT_PATH else COMPLETION)
    return json.loads(msgspec.json.encode(made))


@pytest.fixture
async def sglang_gateway(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
) -> AsyncIterator[tuple[Gateway, SglangDouble]]:
    async with served(tmp_path, model_dir, redis_url, migrated) as pair:
        yield pair


@pytest.mark.parametrize("fields", [DANGEROUS, IGNORED], ids=["dangerous", "ignored"])
async def test_no_field_of_sglangs_own_passes_and_a_refusal_costs_nothing(
    sglang_gateway: tuple[Gateway, SglangDouble], fields: dict[str, Any]
):
    gateway, sglang = sglang_gateway
    acme = await gateway.tenant("acme")
    for name, value in fields.items():
        for stream in (False, True):
            if name == "prompt_logprobs" and stream:
                continue
            for got in (await acme.chat(**{name: value, "stream": stream}), await acme.complete(**{name: value})):
                assert (got.status, got.error["param"], got.error["code"]) == (400, name, "unsupported_parameter"), name
    assert sglang.requests == []
    assert sum(row["prompt_tokens"] + row["completion_tokens"] for row in await acme.usage()) == 0


def test_the_table_of_dangerous_fields_is_complete():
    """Every field of SGLang's requests is served, translated, refused above, or a name that the gateway sets itself."""
    ours = {"model", "cache_salt", "user", "best_of", "suffix", "response_format", "priority", "continue_final_message"}
    assert (CHAT | COMPLETION) - SERVED - DANGEROUS.keys() == ours


async def test_only_declared_fields_are_sent_at_every_depth(sglang_gateway: tuple[Gateway, SglangDouble]):
    gateway, sglang = sglang_gateway
    acme = await gateway.tenant("deep")
    part = {"type": "text", "text": "Hi", "image_url": {"url": "http://169.254.169.254/"}}
    message = {"role": "user", "content": [part], "tools": [{"a": 1}], "reasoning_content": "x"}
    got = await acme.chat(
        messages=[message],
        stream=True,
        stream_options={"include_usage": False, "stream_interval": 9},
        max_tokens=2,
        rid=None,
        metadata={"a": "b"},
        user="somebody",
        parallel_tool_calls=True,
    )
    assert got.status == 200, got.body
    body = sglang.requests.pop()[1]
    assert body.pop("cache_salt")
    assert body == {
        "model": "default",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 2,
    }


@pytest.mark.parametrize("on_token_limit", ["refuse", "shorten"])
async def test_a_server_gets_only_the_maximum_that_is_reserved(
    sglang_gateway: tuple[Gateway, SglangDouble], on_token_limit: str
):
    """A server that prefers `max_tokens` would generate more than the reservation of `max_completion_tokens`."""
    gateway, sglang = sglang_gateway
    acme = await gateway.tenant("acme", tokens_per_minute=100, on_token_limit=on_token_limit)
    most = 2 if on_token_limit == "refuse" else 200
    got = await acme.chat(max_completion_tokens=most, max_tokens=200)
    assert got.status == 200, got.body
    body = sglang.requests.pop()[1]
    assert "max_tokens" not in body
    assert 1 <= body["max_completion_tokens"] <= min(most, 99)


def test_tools_are_sent_as_declared():
    tool = {"type": "function", "function": {"name": "f", "defer_loading": True}, "defer_loading": True}
    assert sent({"tools": [tool]})["tools"] == [{"type": "function", "function": {"name": "f"}}]


def test_hints_are_dropped_and_values_translated():
    assert not (sent(dict.fromkeys(DROPPED, 1)).keys() & DROPPED)
    assert sent({"top_k": 0})["top_k"] == -1
    assert sent({"seed": 5})["seed"] == 5
    assert sent({"return_token_ids": False, "bad_words": [], "add_generation_prompt": True}).keys() == {
        "model",
        "messages",
        "cache_salt",
    }


def test_constraints_are_sent_in_sglangs_form_and_no_further_member_passes():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True, "x": 1}, "y": 1}
    assert sent({"response_format": given})["response_format"] == wanted
    assert sent({"guided_json": schema}, "/v1/completions")["response_format"] == wanted
    assert sent({"structured_outputs": {"regex": "a+"}})["regex"] == "a+"
    assert sent({"response_format": {"type": "json_object", "x": 1}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in sent({"response_format": {"type": "text"}})
    with pytest.raises(BadRequest):
        sent({"response_format": {"type": "structural_tag", "structures": [], "triggers": []}})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"repetition_penalty": 2.5}, "repetition_penalty"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"add_special_tokens": False}, "add_special_tokens"),
    ],
)
def test_values_that_sglang_refuses_or_ignores_are_named(body: dict[str, Any], field: str):
    with pytest.raises(BadRequest) as refused:
        sent(body, "/v1/completions")
    assert refused.value.param == field


@pytest.mark.parametrize("name", ["seed", "tools"])
def test_fields_that_need_a_flag_of_the_server_are_refused_by_name(name: str):
    value = {"seed": 1, "tools": [{"type": "function", "function": {"name": "f"}}]}[name]
    with pytest.raises(BadRequest) as refused:
        sent({name: value}, reported={})
    assert refused.value.param == name


@pytest.mark.parametrize(
    "variables",
    [
        {"spaces_between_special_tokens": {}},
        {"spaces_between_special_tokens": True},
        {"reasoning_effort": {}},
        {"chat_template": "{{ 1 }}"},
        {"tokenize": True},
        {"tools": []},
    ],
)
def test_chat_template_kwargs_cannot_reach_sglangs_processes(variables: dict[str, Any]):
    """An object as `spaces_between_special_tokens` would end SGLang's detokenizer process, which all requests share."""
    with pytest.raises(BadRequest) as refused:
        sent({"chat_template_kwargs": variables})
    assert refused.value.param == "chat_template_kwargs"
    assert sent({"chat_template_kwargs": {"enable_thinking": True}})["chat_template_kwargs"]
