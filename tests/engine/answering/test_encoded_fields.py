"""The lengths of a whole answer's fields, by which a gateway takes them unread."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET, Struct

from engine.answering import running
from engine.answering.fields import encode_fields
from testing.engine import Client, RunningServer
from wire.responses import (
    FIELDS_HEADER,
    REPORT_TYPE,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    GenerationProgress,
    PromptTokensDetails,
    Usage,
)

INTERNAL = {"x-loraplex-internal-token": "secret"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
HOSTILE = '"}],"usage":{"completion_tokens":0},\\\x00\u2028é\U0001f600'
USAGE = Usage(1, 2, 3, PromptTokensDetails(0))
LOGPROBS = CompletionLogprobs([0], [-1.0], [HOSTILE], [{"usage": -1.0, HOSTILE: -2.0}])
TEXT = CompletionChoice(0, HOSTILE, LOGPROBS, "stop", HOSTILE)
SAID = ChatChoice(0, message=ChatMessage("assistant", HOSTILE))
ANSWERS = [
    Completion(HOSTILE, "text_completion", 1, HOSTILE, [TEXT, TEXT], USAGE, GenerationProgress(2, 1, 0, None, True)),
    Completion("", "text_completion", 1, "m", [], None),
    ChatCompletion("x", "chat.completion", 1, HOSTILE, [SAID], USAGE, prompt_logprobs=[None, {}], prompt_token_ids=[1]),
    ChatCompletion("x", "chat.completion", 1, "m", [SAID], UNSET, GenerationProgress(2, 1, 0, "base", UNSET, "length")),
]


@pytest.fixture(scope="module")
def server(model):
    running = RunningServer(model, internal_token="secret")
    yield running
    running.close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_fields_are_encoded_as_the_answer_is(answer: Struct):
    body, lengths = encode_fields(answer)
    assert body == msgspec.json.encode(answer)
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    assert list(lengths.items()) == [(name, len(memoryview(raw))) for name, raw in fields.items()]


async def ask(client: Client, path: str, body: Any, headers: dict[str, str]) -> tuple[str, Any, bytes]:
    """Return the type of the response, the head of the answer, and its body."""
    async with client.session.post(client.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        head: Any = dict(response.headers)
        while response.content_type == REPORT_TYPE and "status" not in head:
            head = json.loads(await response.content.readline())["answer"] or head
        return response.content_type, head.get("headers", head), await response.content.read()


@pytest.mark.parametrize("allowance", ["1000", "40"])
@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", CHAT)])
async def test_a_gateway_is_told_the_lengths_and_the_reason(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, asked: Any, allowance: str
):
    body = {"model": "tiny", "max_tokens": 20, "n": 2, "temperature": 0, "ignore_eos": True, "logprobs": 3} | asked
    if "prompt" not in asked:
        body |= {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1}
    for is_in_pieces in (False, True):
        if is_in_pieces:
            monkeypatch.setattr(running, "PIECE_BYTES", 100)
            monkeypatch.setattr(running, "INLINE_LOGPROBS", 10)
        allowed = {"x-request-id": f"{path}-{allowance}-{is_in_pieces}", "x-loraplex-allowance": allowance}
        kind, head, data = await ask(client, path, body, INTERNAL | allowed)
        assert kind == ("application/json" if allowance == "1000" else REPORT_TYPE)
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        lengths = json.loads(head[FIELDS_HEADER])
        assert list(lengths.items()) == [(name, len(memoryview(raw))) for name, raw in fields.items()]
        assert msgspec.json.decode(fields["loraplex"])["finish_reason"] == "length"
        assert ("prompt_logprobs" in lengths) == (path == "/v1/chat/completions")


async def test_the_reason_is_the_last_choices(client: Client):
    """Different choices end for different reasons; the gateway records the last one's."""
    body = {"model": "tiny", "prompt": "hi", "n": 4, "max_tokens": 12, "temperature": 2, "logit_bias": {"3": 5.0}}
    seen = set()
    for seed in range(20):
        found = await ask(client, "/v1/completions", body | {"seed": seed, "stop_token_ids": [3]}, INTERNAL)
        answer = json.loads(found[2])
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        assert answer["loraplex"]["finish_reason"] == reasons[-1]
        seen.add(tuple(reasons))
    assert any(reasons[0] != reasons[-1] for reasons in seen), "the reasons differ"
