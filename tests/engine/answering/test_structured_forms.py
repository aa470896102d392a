"""Structured output over real HTTP: each request form, its text and its refusals."""

import asyncio
import json
import re
from typing import Any

import pytest

from testing.engine import Client
from tests.engine.structured.schemas import fits

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Who is it?"}]


@pytest.mark.parametrize("temperature", [0, 1])
async def test_both_routes_give_json_that_fits_for_every_choice(client: Client, temperature: float) -> None:
    fields = {"response_format": FORMAT, "max_tokens": 200, "temperature": temperature, "n": 3, "seed": 1}
    texts = [c["text"] for c in (await client.complete(prompt="It is", **fields))["choices"]]
    chat = await client.chat(messages=MESSAGES, **fields)
    texts += [choice["message"]["content"] for choice in chat["choices"]]
    assert len(texts) == 6
    assert all(fits(json.loads(text), SCHEMA) for text in texts), texts
    assert {choice["finish_reason"] for choice in chat["choices"]} == {"stop"}
    assert len(set(texts)) == (2 if temperature == 0 else 6)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no", "Größe 🎉"]}, "yes|no|Größe 🎉"),
        ({"guided_grammar": 'root ::= "x" ("1" | "2")'}, "x[12]"),
        ({"structured_outputs": {"regex": "a{4}"}}, "aaaa"),
        ({"structured_outputs": {"choice": ["only"]}}, "only"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        ({"structured_outputs": {"json": {"enum": ["u", 7]}}}, '"u"|7'),
        ({"guided_json": '{"const": {"a": null}}'}, r'\{\s*"a"\s*:\s*null\s*\}'),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_vllms_forms(client: Client, fields: dict[str, Any], pattern: str, temperature: float) -> None:
    answer = await client.complete(prompt="so", max_tokens=100, temperature=temperature, seed=1, **fields)
    [choice] = answer["choices"]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"


async def test_a_stream_says_the_same(client: Client) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 200, "temperature": 0}
    events = await client.events("/v1/chat/completions", body)
    text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
    assert text == (await client.ok("/v1/chat/completions", body))["choices"][0]["message"]["content"]
    assert fits(json.loads(text), SCHEMA)


async def test_any_object(client: Client) -> None:
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 400, "temperature": 1}
    answer = await client.chat(messages=MESSAGES, n=8, seed=3, **fields)
    ended = [c["message"]["content"] for c in answer["choices"] if c["finish_reason"] == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in ended), ended
    assert all(c["message"]["content"].startswith("{") for c in answer["choices"])
    assert ended


async def test_with_an_adapter_beside_the_base_and_free_requests(client: Client, adapter: Any) -> None:
    await client.ok("/v1/load_lora_adapter", {"lora_name": "shaped", "lora_path": str(adapter)})
    free = {"prompt": "The quick", "max_tokens": 12, "ignore_eos": True}
    alone = (await client.complete(**free))["choices"][0]["text"]
    bound = {"prompt": "It is", "max_tokens": 200, "response_format": FORMAT}
    asked = [client.complete(**free), client.complete(**bound), client.complete(model="shaped", **bound)]
    asked += [client.complete(model="shaped", prompt="x", guided_choice=["left", "right"])]
    texts = [answer["choices"][0]["text"] for answer in await asyncio.gather(*asked)]
    assert texts[0] == alone
    assert fits(json.loads(texts[1]), SCHEMA)
    assert fits(json.loads(texts[2]), SCHEMA)
    assert texts[3] in ("left", "right")


async def test_logprobs_stop_strings_and_limits_go_with_it(client: Client) -> None:
    answer = await client.complete(prompt="x", guided_regex="a{9}", stop="aaaaa", logprobs=2, max_tokens=50)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    answer = await client.complete(prompt="x", guided_regex="[0-9]{50}", max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = await client.complete(prompt="x", guided_choice=["a"], min_tokens=9, max_tokens=9, ignore_eos=True)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("a", 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_json": {"type": "foo"}}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"structured_outputs": {"regex": "(a)\\1"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_compile_is_400_naming_the_field(
    client: Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"model": "tiny", "prompt": "x", "stream": stream} | fields
    status, answer = await client.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"]


async def test_a_grammar_too_ambiguous_to_follow_is_400_and_harms_nobody(client: Client) -> None:
    ambiguous = {"guided_grammar": 'start: s\ns: s s | s s s | "a" | "b" | ""'}
    hostile = client.post(
        "/v1/completions",
        {"model": "tiny", "prompt": "x", "max_tokens": 3000, "min_tokens": 3000} | ambiguous,
    )
    friend = client.complete(prompt="x", guided_choice=["yes", "no"])
    (status, answer), good = await asyncio.gather(hostile, friend)
    assert (status, answer["error"]["param"]) == (400, "guided_grammar")
    assert good["choices"][0]["text"] in ("yes", "no")
    state = await client.wait_for(lambda state: not state["running"] and not state["waiting"])
    assert state["kv_blocks_free"] == state["kv_blocks_total"]
