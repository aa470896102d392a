"""Fields of vLLM's API beyond OpenAI's, besides sampling: metadata of an answer, and the form of a prompt."""

import shutil

import pytest

from testing.engine import Client, RunningServer
from testing.tiny import save_byte_fallback_tokenizer, save_model

ASKED = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
MESSAGES = [{"role": "user", "content": "Hi"}]


async def tokens_of(client: Client, text: str, **fields: object) -> list[int]:
    return (await client.ok("/tokenize", {"prompt": text} | fields))["tokens"]


async def test_the_stop_reason_is_the_string_or_the_token_that_was_asked_for(client):
    free = await client.complete(**ASKED, return_token_ids=True)
    [choice] = free["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    # The first occurrence of a stop token ends the answer there; likewise a stop text.
    token = choice["token_ids"][5]
    by_id = await client.complete(**ASKED, stop_token_ids=[token])
    assert (by_id["choices"][0]["finish_reason"], by_id["choices"][0]["stop_reason"]) == ("stop", token)
    text = choice["text"][3:6]
    by_text = await client.complete(**ASKED, stop=["never there", text])
    assert by_text["choices"][0]["stop_reason"] == text
    events = await client.events("/v1/completions", ASKED | {"stop": [text]})
    assert events[-1]["choices"][0]["stop_reason"] == text
    # The model's own end token is no stop of the request.
    ended = await client.chat(messages=MESSAGES, logit_bias={"2": 100}, max_tokens=3)
    assert (ended["choices"][0]["finish_reason"], ended["choices"][0]["stop_reason"]) == ("stop", None)


async def test_prompts_of_another_salt_share_no_cache(client):
    asked = ASKED | {"prompt": list(range(20, 60)), "max_tokens": 1}

    async def cached(**salt: str) -> int:
        return (await client.complete(**asked, **salt))["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (await cached(), await cached()) == (0, 32)
    assert (await cached(cache_salt="one"), await cached(cache_salt="one")) == (0, 32)
    assert await cached(cache_salt="two") == 0
    for wrong in ("", 1):
        status, answer = await client.post("/v1/completions", asked | {"cache_salt": wrong})
        assert (status, answer["error"]["param"]) == (400, "cache_salt")


async def test_token_ids_come_with_the_text(client):
    prompt = await tokens_of(client, ASKED["prompt"])
    asked = ASKED | {"return_token_ids": True, "skip_special_tokens": False}
    whole = (await client.complete(**asked, n=2))["choices"]
    for choice in whole:
        assert choice["prompt_token_ids"] == prompt
        assert len(choice["token_ids"]) == 8
        assert (await client.ok("/detokenize", {"tokens": choice["token_ids"]}))["prompt"] == choice["text"]
    events = await client.events("/v1/completions", asked)
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == whole[0]["token_ids"]
    assert [choice.get("prompt_token_ids") for choice in choices] == [prompt] + [None] * (len(choices) - 1)
    answer = await client.chat(messages=MESSAGES, return_token_ids=True, max_tokens=4, ignore_eos=True)
    assert answer["prompt_token_ids"] == (await client.ok("/tokenize", {"messages": MESSAGES}))["tokens"]
    assert len(answer["choices"][0]["token_ids"]) == 4
    assert "token_ids" not in (await client.complete(**ASKED))["choices"][0]


async def test_tokens_can_be_named_by_their_ids(client):
    answer = await client.complete(**ASKED, logprobs=2, return_token_ids=True, return_tokens_as_token_ids=True)
    [choice] = answer["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    plain = (await client.complete(**ASKED, logprobs=2))["choices"][0]
    assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]


async def test_the_prompt_alone(client):
    """`max_tokens` 0 with `echo` scores a text."""
    full = await client.complete(**ASKED, echo=True, logprobs=2)
    length = full["usage"]["prompt_tokens"]
    answer = await client.complete(**ASKED | {"max_tokens": 0}, echo=True, logprobs=2)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (ASKED["prompt"], "length")
    assert answer["usage"]["completion_tokens"] == 0
    for name, values in choice["logprobs"].items():
        assert values == full["choices"][0]["logprobs"][name][:length]
    events = await client.events("/v1/completions", ASKED | {"max_tokens": 0, "echo": True})
    assert "".join(event["choices"][0]["text"] for event in events) == ASKED["prompt"]
    assert (await client.state())["running"] == 0


async def test_usage_in_every_event(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await client.events("/v1/completions", ASKED | {"stream_options": options, "n": 2})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 16
    assert all(event["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] for event in events)
    assert events[-1]["choices"] == []
    # Like vLLM, a stream has no usage without include_usage.
    alone = await client.events("/v1/completions", ASKED | {"stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in event for event in alone)


async def test_special_tokens_are_written_if_asked(client):
    # Token 1 is `<|start|>`, which ends nothing.
    forced = ASKED | {"logit_bias": {"1": 100}, "max_tokens": 2}
    assert (await client.complete(**forced))["choices"][0]["text"] == ""
    shown = await client.complete(**forced, skip_special_tokens=False, logprobs=0)
    assert shown["choices"][0]["text"] == "<|start|><|start|>"
    assert shown["choices"][0]["logprobs"]["text_offset"] == [0, len("<|start|>")]


async def test_special_tokens_of_a_prompt(client):
    assert await tokens_of(client, "x", add_special_tokens=False) == await tokens_of(client, "x")
    usage = (await client.complete(**ASKED, add_special_tokens=False))["usage"]
    assert usage["prompt_tokens"] == len(await tokens_of(client, ASKED["prompt"]))


async def test_an_answer_begins_with_the_space_that_follows_its_prompt(session, tmp_path):
    """An answer begins with the space after its prompt, which SentencePiece's decoder drops from a separate text."""
    save_model(tmp_path, save_tokenizer=save_byte_fallback_tokenizer)
    running = RunningServer(tmp_path)
    try:
        client = Client(session, running.url)
        word = (await tokens_of(client, "dog"))[0]
        fields = {"prompt": "The quick", "max_tokens": 1, "logit_bias": {str(word): 100}, "logprobs": 0}
        answer = (await client.complete(**fields))["choices"][0]
        assert answer["text"].startswith(" ")
        echoed = (await client.complete(**fields, echo=True))["choices"][0]
        assert echoed["text"] == "The quick" + answer["text"]
        assert echoed["logprobs"]["text_offset"][-1] == len("The quick")
    finally:
        running.close()


@pytest.mark.parametrize("source", ["auto", "none"])
async def test_the_models_own_way_of_sampling_unless_it_is_left_out(session, model, tmp_path, source):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"top_k": 1, "eos_token_id": 2}')
    running = RunningServer(folder, config={"generation_config": source})
    try:
        client = Client(session, running.url)
        free = {"model": "tiny", "prompt": "The quick", "max_tokens": 20, "ignore_eos": True}
        likeliest = await client.ok("/v1/completions", free | {"temperature": 0})
        said = await client.ok("/v1/completions", free)
        assert (said["choices"][0]["text"] == likeliest["choices"][0]["text"]) is (source == "auto")
    finally:
        running.close()


async def test_a_message_that_is_continued(client):
    messages = [*MESSAGES, {"role": "assistant", "content": "The quick brown"}]
    asked = {"messages": messages, "continue_final_message": True}
    tokens = (await client.ok("/tokenize", asked))["tokens"]
    assert (await client.ok("/detokenize", {"tokens": tokens}))["prompt"].endswith("assistant\nThe quick brown")
    fields = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    answer = await client.chat(**asked, **fields)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    continued = await client.complete(prompt=tokens, **fields)
    assert answer["choices"][0]["message"]["content"] == continued["choices"][0]["text"]
    bare = {"messages": MESSAGES, "add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}}
    answer = await client.chat(**bare, **fields)
    assert answer["usage"]["prompt_tokens"] == (await client.ok("/tokenize", bare))["count"]


async def test_tokens_and_text_lead_back_to_each_other(client):
    text = "<|start|>user\nGr\u00fc\u00dfe \U0001f389<|end|>"
    answer = await client.ok("/tokenize", {"prompt": text, "return_token_strs": True})
    assert (await client.ok("/detokenize", {"tokens": answer["tokens"]}))["prompt"] == text
    assert len(answer["token_strs"]) == answer["count"]
    assert answer["token_strs"][0] == "<|start|>"
    assert "token_strs" not in await client.ok("/tokenize", {"prompt": text})


@pytest.mark.parametrize("field", ["prompt", "messages"])
async def test_a_text_of_far_more_tokens_than_any_context_is_not_told_as_tokens(client, field, monkeypatch):
    monkeypatch.setattr("engine.http.routes.MAX_TOKENIZED", 4096)
    text = "x " * 50_000
    status, answer = await client.post(
        "/tokenize", {field: text if field == "prompt" else [MESSAGES[0] | {"content": text}]}
    )
    assert (status, answer["error"]["param"]) == (400, field)
    assert "at most about 4096 tokens" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("length", [5000, 500_000])
async def test_a_prompt_too_long_is_said_in_openais_words(client, path, length):
    prompt = (
        {"prompt": "x " * length}
        if path == "/v1/completions"
        else {"messages": [MESSAGES[0] | {"content": "x " * length}]}
    )
    status, answer = await client.post(path, {"model": "tiny"} | prompt)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 4096 tokens" in answer["error"]["message"]
