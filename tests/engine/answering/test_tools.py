"""Tools end to end: rendered by the model's own template, required calls enforced, parsed whole and in a stream.

A tiny random model makes no calls by itself: under `auto` it generates text, and required calls come from the grammar.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from testing.engine import Client, RunningServer
from tests.engine.answering.test_generation import content_of
from tests.engine.answering.tools import (
    HISTORY,
    TIME,
    TOOLS,
    USER,
    WEATHER,
    arguments_of,
    calls_of,
    save_tool_model,
)

NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=["hermes", "llama3_json"])
def server(
    starts_servers: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("tools") / request.param
    running = RunningServer(save_tool_model(folder, request.param))
    yield running
    running.close()


async def test_tools_and_their_messages_are_part_of_the_prompt(client: Client):
    fields = {"max_tokens": 1, "messages": [USER]}
    plain = (await client.chat(**fields))["usage"]["prompt_tokens"]
    reported = (await client.chat(**fields, tools=TOOLS))["usage"]["prompt_tokens"]
    assert reported > plain + 50
    assert (await client.chat(**fields, tools=TOOLS, tool_choice="auto"))["usage"]["prompt_tokens"] == reported
    assert (await client.chat(**fields, tools=TOOLS, tool_choice="none"))["usage"]["prompt_tokens"] == plain
    assert (await client.ok("/tokenize", {"messages": [USER], "tools": TOOLS}))["count"] == reported
    text = (await client.ok("/detokenize", await client.ok("/tokenize", {"messages": HISTORY, "tools": TOOLS})))[
        "prompt"
    ]
    assert '{"city": "Oslo"}' in text
    assert "rain" in text


async def test_auto_leaves_text_as_it_is(client: Client):
    fields = {"messages": [USER], "tools": TOOLS, "max_tokens": 24, "ignore_eos": True}
    (choice,) = (await client.chat(**fields))["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    ids = (await client.ok("/tokenize", {"messages": [USER], "tools": TOOLS}))["tokens"]
    same = await client.complete(prompt=ids, max_tokens=24, ignore_eos=True)
    assert choice["message"]["content"] == same["choices"][0]["text"]
    events = await client.events("/v1/chat/completions", {"model": "tiny", "temperature": 0, **fields})
    assert content_of(events) == choice["message"]["content"]


@pytest.mark.parametrize("choice", [NAMED, "required"])
async def test_a_call_that_must_come_comes(client: Client, choice):
    tools = TOOLS if choice == NAMED else [WEATHER]
    fields = {"messages": HISTORY, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
    answer = await client.chat(**fields, temperature=1)
    (said,) = answer["choices"]
    # In OpenAI's and vLLM's APIs, a call of a named function ends with "stop".
    ending = "stop" if choice == NAMED else "tool_calls"
    assert said["finish_reason"] == ending
    assert said["message"]["content"] is None
    (call,) = said["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert arguments_of(call)["city"] in ("Oslo", "Rome")
    events = await client.events("/v1/chat/completions", {"model": "tiny", **fields, "temperature": 1})
    (streamed,) = calls_of(events)
    assert (streamed["name"], streamed["arguments"]) == ("weather", call["function"]["arguments"])
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert choices[-1]["finish_reason"] == ending
    # Text that only introduces a call is not sent: each piece in between carries a part of a call.
    assert all(choice["delta"].keys() == {"tool_calls"} for choice in choices[1:-1])
    assert choices[-1]["delta"].keys() <= {"tool_calls"}


async def test_the_tokens_that_lead_to_a_call_come_where_they_are_asked_for(client: Client):
    fields = {"messages": [USER], "tools": [WEATHER], "tool_choice": NAMED, "logprobs": True, "return_token_ids": True}
    answer = await client.chat(**fields)
    events = await client.events("/v1/chat/completions", {"model": "tiny", "temperature": 0, **fields})
    choices = [choice for event in events for choice in event["choices"]]
    [whole] = answer["choices"]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == whole["token_ids"]
    named = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert named == whole["logprobs"]["content"]
    assert all("content" not in choice["delta"] for choice in choices[1:])


async def test_a_gateway_hears_of_every_token_its_client_of_none_that_says_nothing(session, tmp_path):
    running = RunningServer(save_tool_model(tmp_path / "model", "hermes"), internal_token="secret")
    try:
        client, headers = Client(session, running.url), {"x-loraplex-internal-token": "secret"}
        body = {"model": "tiny", "messages": [USER], "tools": [WEATHER], "tool_choice": NAMED, "temperature": 0}
        events = await client.events("/v1/chat/completions", body, headers=headers)
        whole = await client.ok("/v1/chat/completions", body, headers=headers)
    finally:
        running.close()
    counts = [event["loraplex"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"]
    [call] = whole["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"]] == [streamed["arguments"] for streamed in calls_of(events)]
    choices = [choice for event in events for choice in event["choices"]]
    assert all(choice["delta"].keys() == {"tool_calls"} for choice in choices[1:-1])


async def test_each_choice_has_its_own_calls(client: Client):
    fields = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "n": 4, "seed": 3, "temperature": 2}
    answer = await client.chat(**fields, parallel_tool_calls=False)
    calls = [choice["message"]["tool_calls"][0] for choice in answer["choices"]]
    assert {call["function"]["name"] for call in calls} <= {"weather", "time"}
    assert len({call["id"] for call in calls}) == 4
    assert all(isinstance(arguments_of(call), dict) for call in calls)


async def test_a_call_cut_short_is_what_there_was(client: Client):
    fields = {"messages": [USER], "tools": [WEATHER], "tool_choice": NAMED}
    whole = (await client.chat(**fields))["choices"][0]["message"]["tool_calls"][0]
    used = (await client.chat(**fields))["usage"]["completion_tokens"]
    (cut,) = (await client.chat(**fields, max_tokens=used - 8))["choices"]
    assert cut["finish_reason"] == "length"
    (call,) = cut["message"]["tool_calls"]
    assert whole["function"]["arguments"].startswith(call["function"]["arguments"])


async def test_the_openai_client_reads_a_streamed_call(server):
    import openai

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        fields = {"model": "tiny", "messages": [USER], "tools": [TIME, WEATHER], "tool_choice": NAMED}
        whole = await client.chat.completions.create(**fields, temperature=0)
        call = whole.choices[0].message.tool_calls[0]
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        async with client.chat.completions.stream(**fields, temperature=0) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}],
          "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {
            "type": "integer", "multipleOf": 1_000_003}}}}}], "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
async def test_choices_that_cannot_be_kept_are_refused(client: Client, fields, param):
    status, answer = await client.post("/v1/chat/completions", {"model": "tiny", "messages": [USER]} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.usefixtures("starts_servers")
async def test_a_template_whose_calls_are_not_known_needs_the_flag(tmp_path):
    folder = save_tool_model(tmp_path / "model", "hermes")
    (folder / "chat_template.jinja").write_text(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    body = {"model": "tiny", "messages": [USER], "tools": TOOLS, "max_tokens": 1}
    for parser, expected in ((None, 400), ("hermes", 200)):
        server = RunningServer(folder, tool_call_parser=parser)
        try:
            async with aiohttp.ClientSession() as session:
                status, answer = await Client(session, server.url).post("/v1/chat/completions", body)
        finally:
            server.close()
        assert status == expected, answer
        assert status == 200 or answer["error"]["param"] == "tools"
