"""Completions and chat over real HTTP: text, streams and counts."""

import asyncio

import pytest

from testing.engine import RunningServer

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Hi there"}]


def text_of(events: list, index: int = 0) -> str:
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def content_of(events: list, index: int = 0) -> str:
    return "".join(c["delta"].get("content", "") for e in events for c in e["choices"] if c["index"] == index)


async def test_a_completion_has_the_apis_shape_and_adds_up(client):
    answer = await client.complete(prompt=PROMPT, max_tokens=8, ignore_eos=True)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    prompt_tokens = (await client.ok("/tokenize", {"prompt": PROMPT}))["count"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 8)
    assert usage["total_tokens"] == prompt_tokens + 8
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


async def test_cached_tokens_are_reported(client):
    prompt = "cache me if you can, " * 8
    first = (await client.complete(prompt=prompt, max_tokens=1))["usage"]
    second = (await client.complete(prompt=prompt, max_tokens=1))["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


async def test_the_four_forms_of_a_prompt_say_the_same(client):
    ids = (await client.ok("/tokenize", {"prompt": PROMPT}))["tokens"]
    forms = [PROMPT, [PROMPT], ids, [ids]]
    texts = [(await client.complete(prompt=form, max_tokens=6))["choices"][0]["text"] for form in forms]
    assert texts == texts[:1] * 4


async def test_many_prompts_and_choices_are_numbered_prompt_by_prompt(client):
    answer = await client.complete(prompt=["one fox", "two dogs"], n=2, max_tokens=5, ignore_eos=True)
    alone = [
        (await client.complete(prompt=prompt, max_tokens=5, ignore_eos=True))["choices"][0]["text"]
        for prompt in ("one fox", "two dogs")
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    counts = [(await client.ok("/tokenize", {"prompt": prompt}))["count"] for prompt in ("one fox", "two dogs")]
    assert answer["usage"]["prompt_tokens"] == sum(counts)
    assert answer["usage"]["completion_tokens"] == 20


async def test_streamed_text_is_the_whole_text(client):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    events = await client.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    whole = await client.complete(prompt=PROMPT, max_tokens=40, ignore_eos=True)
    assert text_of(events) == whole["choices"][0]["text"]
    *chunks, last = events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [c["finish_reason"] for c in (e["choices"][0] for e in chunks)][-1] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 40
    assert len({event["id"] for event in events}) == 1
    assert "loraplex" not in events[0]


async def test_streamed_chat_opens_with_the_role_and_says_the_same(client):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    events = await client.events("/v1/chat/completions", body)
    whole = await client.chat(messages=MESSAGES, max_tokens=20, ignore_eos=True)
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["role"] == "assistant"
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content_of(events) == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in event for event in events)


async def test_streamed_choices_are_whole_each(client):
    fields = {"prompt": PROMPT, "n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12}
    events = await client.events("/v1/completions", {"model": "tiny", **fields})
    whole = await client.complete(**fields)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [text_of(events, i) for i in range(3)] == texts
    assert len(set(texts)) == 3


async def test_chat_may_fill_the_context_by_default(client):
    limit = (await client.state())["max_model_len"]
    answer = await client.chat(messages=[{"role": "user", "content": "x " * (limit // 2 - 30)}], ignore_eos=True)
    assert answer["usage"]["total_tokens"] == limit
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_seed_makes_it_reproducible(client):
    fields = {"prompt": PROMPT, "temperature": 1.3, "max_tokens": 16, "ignore_eos": True}
    seeded = [(await client.complete(**fields, seed=5))["choices"][0]["text"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert (await client.complete(**fields, seed=6))["choices"][0]["text"] != seeded[0]


async def test_stop_strings_cut_the_text_and_free_the_request(client):
    text = (await client.complete(prompt=PROMPT, max_tokens=60, ignore_eos=True))["choices"][0]["text"]
    stop = text[10:14]
    at = text.index(stop)
    fields = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stop": [stop, "never-said"]}
    cut = await client.complete(**fields)
    assert cut["choices"][0]["text"] == text[:at]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 60
    kept = await client.complete(**fields, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == text[: at + len(stop)]
    events = await client.events("/v1/completions", {"model": "tiny", "temperature": 0, **fields})
    assert text_of(events) == text[:at]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    await client.wait_for(lambda state: not state["running"])


async def test_answers_that_a_stop_string_ended_are_learnt(client, server: RunningServer):
    """The engine expected 1,050 tokens of each answer of a client that always sends stop strings."""
    learnt = server.core.engine.scheduler._block_demand
    text = (await client.complete(prompt=PROMPT, max_tokens=60, ignore_eos=True))["choices"][0]["text"]
    for _ in range(4):
        before = learnt.expected_outputs("")
        await client.complete(prompt=PROMPT, max_tokens=60, ignore_eos=True, stop=[text[10:14]])
        await client.wait_for(lambda state: not state["running"])
        assert 60 < learnt.expected_outputs("") < 0.95 * before


async def test_stop_token_ids_end_without_being_said(client):
    answer = await client.complete(prompt=PROMPT, max_tokens=20, ignore_eos=True, logprobs=0)
    text = answer["choices"][0]["text"]
    ids = (await client.ok("/tokenize", {"prompt": PROMPT}))["tokens"]
    greedy = await client.complete(prompt=ids, max_tokens=20, ignore_eos=True, logprobs=0)
    names = greedy["choices"][0]["logprobs"]["tokens"]
    wanted = next(i for i in range(3, 20) if names[i] not in names[:i] and names[i].isascii())
    stop_id = (await client.ok("/tokenize", {"prompt": names[wanted]}))["tokens"]
    assert len(stop_id) == 1
    cut = await client.complete(prompt=PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=stop_id)
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == wanted + 1
    assert text.startswith(cut["choices"][0]["text"])
    assert not cut["choices"][0]["text"].endswith(names[wanted])


async def test_logprobs_of_completions(client):
    answer = await client.complete(prompt=PROMPT, max_tokens=4, ignore_eos=True, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {4}
    assert logprobs["text_offset"][0] == 0
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob <= 0
        assert top[token] == pytest.approx(max(top.values()))  # greedy


async def test_logprobs_of_chat(client):
    fields = {"messages": MESSAGES, "max_tokens": 4, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    (choice,) = (await client.chat(**fields))["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    events = await client.events("/v1/chat/completions", {"model": "tiny", "temperature": 0, **fields})
    streamed = [e for event in events for c in event["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]


async def test_echo_puts_the_prompt_first(client):
    plain = await client.complete(prompt=PROMPT, max_tokens=4)
    echoed = await client.complete(prompt=PROMPT, max_tokens=4, echo=True, logprobs=1)
    (choice,) = echoed["choices"]
    assert choice["text"] == PROMPT + plain["choices"][0]["text"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == echoed["usage"]["total_tokens"]
    assert "".join(logprobs["tokens"]).startswith(PROMPT)
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    events = await client.events(
        "/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "echo": True}
    )
    assert text_of(events) == choice["text"]


async def test_many_at_once_are_each_what_they_are_alone(client):
    prompts = [f"number {i}: the dog" for i in range(24)]
    fields = {"max_tokens": 12, "ignore_eos": True}
    alone = [(await client.complete(prompt=prompt, **fields))["choices"][0]["text"] for prompt in prompts[:3]]
    answers = await asyncio.gather(*(client.complete(prompt=prompt, **fields) for prompt in prompts))
    assert [answer["choices"][0]["text"] for answer in answers[:3]] == alone
    assert all(answer["usage"]["completion_tokens"] == 12 for answer in answers)
    state = await client.wait_for(lambda state: not state["running"] and not state["waiting"])
    assert state["kv_blocks_free"] == state["kv_blocks_total"]


async def test_tokenize_and_detokenize(client):
    answer = await client.ok("/tokenize", {"model": "tiny", "prompt": "héllo 你好"})
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == (await client.state())["max_model_len"]
    assert (await client.ok("/detokenize", {"tokens": answer["tokens"]}))["prompt"] == "héllo 你好"
    chat = await client.ok("/tokenize", {"messages": MESSAGES})
    used = await client.chat(messages=MESSAGES, max_tokens=1)
    assert chat["count"] == used["usage"]["prompt_tokens"]
    without = await client.ok("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert without["count"] < chat["count"]
    long = "hello world " * 2000
    assert (await client.ok("/detokenize", await client.ok("/tokenize", {"prompt": long})))["prompt"] == long


async def test_the_openai_client_reads_it_all(server):
    import openai

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 10, "temperature": 0}
        whole = await client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
        assert whole.choices[0].logprobs.content[0].token
        assert whole.usage.prompt_tokens_details.cached_tokens >= 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**fields, **options)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**fields | {"model": "nobody"})
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="x", temperature=9)
        assert refused.value.param == "temperature"
