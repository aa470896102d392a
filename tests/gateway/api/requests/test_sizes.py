"""Fields besides the prompt: a large one is refused by its name before it is copied."""

import io
import json
from typing import Any

import pytest

from gateway.api.requests.sizes import MAX_OTHER_BYTES, MAX_USER_CHARS, check_raw_sizes, check_sizes
from gateway.errors import BadRequest
from testing.gateway.running import BASE_MODEL, HI, Gateway
from testing.gateway.upstream import Upstream
from wire.decoding import decode
from wire.requests import ChatCompletionRequest, CompletionRequest

BIG = "a" * (MAX_OTHER_BYTES + 1000)


def check(kind: type[ChatCompletionRequest] | type[CompletionRequest], body: dict[str, Any], *, ascii: bool) -> None:
    raw = json.dumps(body, ensure_ascii=ascii).encode()
    prompt_bytes = check_raw_sizes(raw, kind)
    check_sizes(decode(kind, raw), prompt_bytes)


def chat(**fields: Any) -> None:
    check(ChatCompletionRequest, {"model": "m", "messages": HI, **fields}, ascii=True)


def completion(**fields: Any) -> None:
    check(CompletionRequest, {"model": "m", "prompt": "Hi", **fields}, ascii=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"user": "a" * (MAX_USER_CHARS + 1)}, "user"),
        ({"user": BIG}, "user"),
        ({"x": BIG}, "x"),
        ({"x": BIG[:700_000], "metadata": {"a": BIG[:800_000]}}, "metadata"),
        ({"prompt_cache_key": BIG}, "prompt_cache_key"),
        ({"prompt": BIG}, "prompt"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "x": 3 * BIG}]}, "tools"),
        ({"messages": [{**HI[0], "x": BIG}]}, "messages"),
        ({"messages": [{**HI[0], "name": BIG}]}, "messages"),
        ({"messages": [{**HI[0], "content": [{"type": "text", "text": "Hi", "x": BIG}]}]}, "messages"),
        ({"\u00e9" * 100: BIG}, "\u00e9" * 64),
    ],
)
def test_a_large_field_is_refused_by_its_name(fields: dict[str, Any], param: str):
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert refused.value.message.startswith(param)
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "\U0001f600" * MAX_USER_CHARS},
        {"user": "a" * MAX_USER_CHARS, "x": BIG[: MAX_OTHER_BYTES - 2000]},
        {"messages": [{**HI[0], "content": "\u00e9" * 2**20}]},
        {"messages": [{**HI[0], "content": "\U0001f600" * 2**18}], "user": "\U0001f600" * MAX_USER_CHARS},
        {"messages": [{**HI[0], "content": [{"type": "text", "text": "a" * 2**21}]}]},
        {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant") * 2000], "x": BIG[:900_000]},
        {
            "messages": [
                *HI,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": BIG[:1_000_000]}}}]},
            ],
            "x": BIG[:900_000],
        },
        {"allowed_token_ids": list(range(10**6, 10**6 + 2**18))},
    ],
)
def test_what_an_honest_client_may_send_passes(fields: dict[str, Any]):
    chat(**fields)


def test_a_prompt_is_bounded_by_the_context_only():
    completion(prompt="\u00e9" * 2**21)
    completion(prompt=["a" * 2**20] * 3)
    with pytest.raises(BadRequest, match="messages"):
        completion(messages=BIG)


def test_a_body_that_is_no_object_is_left_to_the_decoder():
    for raw in (b"[" + b" " * MAX_OTHER_BYTES, b'"' + b"a" * MAX_OTHER_BYTES + b'"', b"\xff" * (MAX_OTHER_BYTES + 1)):
        assert check_raw_sizes(raw, CompletionRequest) == 0


async def test_a_long_user_is_a_400_that_names_the_field(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    for size in (MAX_USER_CHARS + 1, 2**21):
        raw = json.dumps({"model": BASE_MODEL, "messages": HI, "user": "a" * size}).encode()
        kind = {"Content-Type": "application/json"}
        got = await acme.call("POST", "/v1/chat/completions", data=io.BytesIO(raw), headers=kind)
        assert (got.status, got.error["param"]) == (400, "user"), got.body
        assert str(MAX_USER_CHARS) in got.error["message"]
    assert upstream.requests == []
    assert (await acme.chat(user="a" * MAX_USER_CHARS)).status == 200
