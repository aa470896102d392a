"""Every request field: accepted values, refused values, and a refusal that names the field."""

import json
import re
from typing import Any

import pytest

from engine.answering.sampling import sampling_params
from engine.answering.token_rules import token_rules
from engine.core.messages import TokenRules
from engine.sampling_defaults import SamplingDefaults, read_sampling_defaults
from engine.scheduling.request import SamplingParams
from wire.decoding import decode
from wire.errors import BadRequest, ConfigError
from wire.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
)

COMPLETION = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: object) -> CompletionRequest:
    return decode(CompletionRequest, json.dumps(COMPLETION | fields).encode())


def chat(**fields: object) -> ChatCompletionRequest:
    return decode(ChatCompletionRequest, json.dumps(CHAT | fields).encode())


BAD = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
    ("user", 5), ("prompt_logprobs", -1),
    ("stop", "x" * 1025), ("top_k", 2**31),
    ("prompt_logprobs", 21),
    ("logit_bias", {str(i): 1 for i in range(1025)}), ("repetition_penalty", 0.001), ("max_tokens", 2**31),
    ("top_p", 0), ("top_p", 1.01), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", 100.1),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 5.5), ("max_tokens", [5]),
    ("min_tokens", -1), ("n", 0), ("n", 17), ("seed", 2**63), ("seed", "x"),
    ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 17), ("stop", 3), ("stop", [3]),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 3), ("ignore_eos", "yes"),
    ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "a"}),
    ("logit_bias", []), ("stream", "yes"), ("stream", 1), ("stream_options", {"include_usage": True}),
    ("stream_options", 1), ("model", 3), ("model", None), ("include_stop_str_in_output", 1),
    ("response_format", "json"), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", ["a"]), ("allowed_token_ids", 3),
    ("bad_words", [""]), ("bad_words", "word"), ("bad_words", [1]), ("bad_words", ["a" * 257]),
    ("bad_words", ["a"] * 1025), ("bad_words", ["a" * 200] * 82), ("use_beam_search", True), ("length_penalty", 2),
    ("logits_processors", ["x"]), ("logprob_token_ids", [1]), ("repetition_detection", {"max_pattern_size": 3}),
    ("guided_whitespace_pattern", " "),
    ("thinking_token_budget", 5), ("truncate_prompt_tokens", 5), ("vllm_xargs", {"a": 1}), ("watermarking", True),
    ("ec_transfer_params", {}), ("kv_transfer_params", {}), ("skip_special_tokens", "no"), ("return_token_ids", 1),
    ("return_tokens_as_token_ids", 1),
    ("guided_json", 5), ("guided_regex", ""), ("guided_choice", []), ("guided_grammar", {}), ("structured_outputs", {}),
]  # fmt: skip
BAD_COMPLETION = [
    ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", ""]), ("prompt", [1, "a"]), ("prompt", [[1], 2]),
    ("prompt", 3), ("prompt", None), ("prompt", {"a": 1}), ("prompt", ["a"] * 2049), ("logprobs", -1), ("logprobs", 21),
    ("logprobs", True), ("echo", 1), ("best_of", 2), ("suffix", "end"), ("prompt_embeds", "x"),
    ("add_special_tokens", 1),
]  # fmt: skip


def nested(depth: int) -> list[Any]:
    """Return `depth` nested lists."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def tool(value: object) -> dict[str, Any]:
    """Return a function whose schema holds a value; the schema itself is one level."""
    return {"type": "function", "function": {"name": "f", "parameters": {"enum": value}}}


BAD_CHAT = [
    ("chat_template", "x"), ("documents", [{}]), ("echo", True), ("add_special_tokens", True),
    ("chat_template_kwargs", {"messages": []}), ("chat_template_kwargs", []), ("add_generation_prompt", 1),
    ("chat_template_kwargs", {"eos_token": "x"}), ("chat_template_kwargs", {"bos_token": ""}),
    ("chat_template_kwargs", {"_room": 1}), ("chat_template_kwargs", {"a": "x" * 2**14}),
    ("chat_template_kwargs", {"a": nested(64)}), ("tools", [tool(nested(65))]), ("tools", [tool(["x" * 2**20])]),
    ("messages", []), ("messages", "hi"), ("max_completion_tokens", 0), ("logprobs", 3), ("top_logprobs", 21),
    ("top_logprobs", 2), ("tools", [{"type": "function"}]), ("tools", [{}] * 129),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [{"type": "function", "function": {"name": "f\n"}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2), ("tool_choice", "must"),
    ("tool_choice", {"type": "f"}),
    ("parallel_tool_calls", 3), ("functions", [{}]), ("tool_choice", "required"),
    ("audio", {}), ("modalities", ["text", "audio"]), ("prediction", {}), ("store", True), ("reasoning_effort", "high"),
]  # fmt: skip


def called(value: object) -> dict[str, Any]:
    """Return a message of the assistant that calls a function with a value."""
    call = {"function": {"name": "f", "arguments": json.dumps({"a": value})}}
    return {"role": "assistant", "tool_calls": [call]}


def test_values_for_templates_may_be_as_deep_as_the_limit():
    chat(chat_template_kwargs={"a": nested(63)}, tools=[tool(nested(63))], messages=[called(nested(63))])


@pytest.mark.parametrize(("field", "value"), BAD + BAD_COMPLETION)
def test_completion_refuses_naming_the_field(field, value):
    with pytest.raises(BadRequest) as caught:
        completion(**{field: value})
    assert caught.value.param is not None
    assert re.split(r"[.\[]", caught.value.param)[0] == field
    assert field in caught.value.message


@pytest.mark.parametrize(("field", "value"), BAD + BAD_CHAT)
def test_chat_refuses_naming_the_field(field, value):
    with pytest.raises(BadRequest) as caught:
        chat(**{field: value})
    assert caught.value.param is not None
    assert re.split(r"[.\[]", caught.value.param)[0] == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": 3, "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ("hi", "messages[0]"),
        (called(nested(64)), "messages[0].tool_calls[0].function.arguments"),
        (called(["x" * 2**20]), "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_bad_messages_are_named_by_their_place(message, param):
    with pytest.raises(BadRequest) as caught:
        chat(messages=[message])
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nope", b'{"model":"m","prompt":"x"} y', b'{"model":"\xff","prompt":"x"}',
        b'{"model":"m","prompt":"x","temperature":NaN}', b'{"model":"m","prompt":"\\ud800"}',
        b'{"model":"m","prompt":"x","z":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_body_that_is_not_json_says_so(body):
    with pytest.raises(BadRequest, match="The body is not valid JSON") as caught:
        decode(CompletionRequest, body)
    assert caught.value.param is None


@pytest.mark.parametrize("body", [b"[]", b"3", b'"x"', b"null"])
def test_a_body_that_is_no_object_says_so(body):
    with pytest.raises(BadRequest, match="the body: expected an object"):
        decode(CompletionRequest, body)


def test_messages_are_in_words():
    with pytest.raises(BadRequest, match=r"^max_tokens: expected an integer, got a string\.$"):
        completion(max_tokens="5")
    with pytest.raises(BadRequest, match=r"^top_p: expected a number above 0 and at most 1, got 0\.$"):
        completion(top_p=0)
    with pytest.raises(BadRequest, match=r"^model: is required\.$"):
        decode(CompletionRequest, b'{"prompt": "x"}')
    with pytest.raises(BadRequest, match="min_tokens: expected at most max_completion_tokens"):
        chat(min_tokens=6, max_completion_tokens=5)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt, prompts):
    assert completion(prompt=prompt).prompts() == prompts


def test_defaults_are_the_apis():
    assert sampling_params(completion(), 16, 0) == SamplingParams()
    assert chat().max_new_tokens is None


def test_nulls_defaults_and_unknown_fields_are_taken():
    fields = {name: None for name, _ in BAD if name != "model"}
    assert sampling_params(completion(**fields), 16, 0) == SamplingParams()
    neutral = {"user": "u", "metadata": {"a": "b"}, "whatever": [1], "response_format": {"type": "text"}, "n": 1}
    assert sampling_params(completion(**neutral, suffix="", best_of=1), 16, 0) == SamplingParams()
    completion(
        use_beam_search=False, bad_words=[], length_penalty=1.0, thinking_token_budget=-1, vllm_xargs={},
        add_special_tokens=True, max_tokens=0, echo=True,
    )  # fmt: skip
    chat(top_logprobs=0, echo=False, add_special_tokens=False, documents=[])
    chat(**neutral, tools=[], tool_choice="none", modalities=["text"], store=False)


async def test_every_parameter_reaches_the_engine():
    request = completion(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, logit_bias={"5": -100}, seed=42, min_tokens=2, stop_token_ids=[9], ignore_eos=True,
        logprobs=3, echo=True,
    )  # fmt: skip
    assert sampling_params(request, 8, 2) == SamplingParams(
        max_tokens=8, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, seed=44, min_tokens=2, stop_token_ids=(9,), ignore_eos=True, logprobs=3,
    )  # fmt: skip
    assert await token_rules(request, None, None, None) == TokenRules(bias={5: -100})  # type: ignore[arg-type]
    assert sampling_params(request, 8, 0).prompt_logprobs == 3, "the first choice computes them for all"
    assert sampling_params(completion(top_k=-1), 8, 0).top_k == 0
    assert 0 <= sampling_params(completion(seed=-1), 8, 0).seed < 2**63  # type: ignore[operator]
    assert sampling_params(chat(logprobs=True, top_logprobs=4), 8, 0).logprobs == 4
    assert sampling_params(chat(logprobs=True), 8, 0).logprobs == 0
    assert chat(max_tokens=3, max_completion_tokens=5).max_new_tokens == 5


def test_the_models_own_defaults_stand_where_a_request_says_nothing(tmp_path):
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": null, "do_sample": true}')
    defaults = read_sampling_defaults(tmp_path)
    params = sampling_params(completion(top_k=0), 16, 0, defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.9, 0, 0.0)
    assert sampling_params(chat(temperature=1, top_p=1), 16, 0, defaults).temperature == 1
    for content in ("[]", "{", '{"temperature": 3}', '{"top_k": "many"}'):
        file.write_text(content)
        with pytest.raises(ConfigError, match="generation_config"):
            read_sampling_defaults(tmp_path)


def test_messages_become_what_templates_expect():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    request = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ]
    )
    parsed = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    assert [message.as_template_input() for message in request.messages] == [
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]


def test_how_the_template_is_asked():
    assert chat().template_input()[2:] == (True, False, {})
    assert chat(add_generation_prompt=False).template_input()[2:] == (False, False, {})
    asked = chat(continue_final_message=True, chat_template_kwargs={"enable_thinking": False})
    assert asked.template_input()[2:] == (False, True, {"enable_thinking": False})
    for fields in ({"add_generation_prompt": True}, {"messages": [{"role": "user", "content": ""}]}):
        with pytest.raises(BadRequest) as caught:
            chat(continue_final_message=True, **fields)
        assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (TokenizeRequest, {}, "prompt"),
        (TokenizeRequest, {"prompt": "x", "messages": CHAT["messages"]}, "prompt"),
        (TokenizeRequest, {"messages": []}, "messages"),
        (DetokenizeRequest, {}, "tokens"),
        (DetokenizeRequest, {"tokens": [-1]}, "tokens[0]"),
        (DetokenizeRequest, {"tokens": "x"}, "tokens"),
        (LoadAdapterRequest, {"lora_path": "/x"}, "lora_name"),
        (LoadAdapterRequest, {"lora_name": "", "lora_path": "/x"}, "lora_name"),
        (LoadAdapterRequest, {"lora_name": "a b", "lora_path": "/x"}, "lora_name"),
        (LoadAdapterRequest, {"lora_name": "a", "lora_path": ""}, "lora_path"),
    ],
)
def test_the_other_bodies(kind, body, param):
    with pytest.raises(BadRequest) as caught:
        decode(kind, json.dumps(body).encode())
    assert caught.value.param == param


def test_openais_developer_role_is_the_templates_system() -> None:
    request = chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert [message.as_template_input()["role"] for message in request.messages] == ["system", "user"]
