"""Each sampling parameter over HTTP has its documented effect, equal for whole answers and streams."""

import pytest

from engine.core.process import InThread
from tests.engine.answering.test_generation import text_of

PROMPT = "The quick brown fox"
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}
DRAWN = {**GREEDY, "temperature": 1.5, "seed": 11}


async def said(client, **fields) -> list[str]:
    """Return the tokens of the one choice, after a check that a stream gives the same."""
    (choice,) = (await client.complete(**fields))["choices"]
    events = await client.events("/v1/completions", {"model": "tiny", **fields})
    assert text_of(events) == choice["text"]
    streamed = [t for e in events for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["tokens"]]
    assert streamed == choice["logprobs"]["tokens"]
    return streamed


async def ids_of(client, **fields) -> list[int]:
    """Return the token ids of the greedy answer, from the most likely token at each position."""
    prompt = (await client.ok("/tokenize", {"prompt": PROMPT}))["tokens"]
    ids = list(prompt)
    for _ in range(fields["max_tokens"]):
        (choice,) = (await client.complete(prompt=[*ids, 0], max_tokens=1, prompt_logprobs=1))["choices"]
        ids.append(next(int(k) for k, v in choice["prompt_logprobs"][-1].items() if v["rank"] == 1))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "narrow",
    [{"top_k": 1}, {"top_p": 1e-300}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-300}, {"temperature": 1e-6}],
)
async def test_the_narrowest_draw_is_the_likeliest_token(client, narrow):
    assert await said(client, **DRAWN | narrow) == await said(client, **GREEDY)


async def test_a_wide_draw_is_not(client):
    greedy = await said(client, **GREEDY)
    drawn = await said(client, **DRAWN)
    assert drawn != greedy
    assert await said(client, **DRAWN, top_k=0, top_p=1, min_p=0) == drawn
    assert await said(client, **DRAWN, top_k=-1) == drawn
    # The same set of tokens, drawn in another order: any number beyond the vocabulary means all of it.
    assert len(await said(client, **DRAWN, top_k=2**31 - 1)) == 24


async def test_bias_forces_and_forbids(client):
    ids = await ids_of(client, max_tokens=3)
    forced = await said(client, **GREEDY, logit_bias={str(ids[1]): 100})
    assert len(set(forced)) == 1
    free = await said(client, **GREEDY)
    (choice,) = (await client.complete(**GREEDY, logit_bias={str(i): -100 for i in ids}))["choices"]
    assert choice["logprobs"]["tokens"][0] != free[0]


async def test_a_bias_is_sent_to_the_core_once_for_all_sequences(client, monkeypatch):
    """It may be large, and the event loop that encodes and decodes it serves all tenants."""
    sizes, send = [], InThread.send

    def record(self: InThread, frame: bytes) -> None:
        sizes.append(len(frame))
        send(self, frame)

    monkeypatch.setattr(InThread, "send", record)
    bias = {str(token_id): 1.0 for token_id in range(3, 353)}
    answer = await client.complete(prompt=["a"] * 100, max_tokens=1, logit_bias=bias)
    assert len(answer["choices"]) == 100
    assert 10 * len(bias) < max(sizes) < 10 * len(bias) * len(answer["choices"]) / 3


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2}])
async def test_penalties_make_for_more_different_tokens(client, penalty):
    fields = GREEDY | {"max_tokens": 60, "logit_bias": {"10": 6, "11": 5.5}}
    plain = await said(client, **fields)
    assert len(set(await said(client, **fields, **penalty))) > len(set(plain))


async def test_a_minimum_holds_off_stop_ids_and_strings(client):
    ids = await ids_of(client, max_tokens=6)
    free = await said(client, **GREEDY)
    stop = {"stop_token_ids": [ids[2]], "ignore_eos": False}
    assert len(await said(client, **GREEDY | stop)) <= 3
    assert len(await said(client, **GREEDY | stop, min_tokens=10)) >= 10
    at = next(i for i, token in enumerate(free) if token.isascii())
    assert len(await said(client, **GREEDY, stop=free[at])) == at + 1
    assert len(await said(client, **GREEDY, stop=free[at], min_tokens=20)) >= 20


async def test_the_end_token_ends_unless_it_is_ignored(client):
    fields = GREEDY | {"logit_bias": {"2": 100}, "ignore_eos": False}
    (choice,) = (await client.complete(**fields))["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("stop", "")
    (choice,) = (await client.complete(**fields | {"ignore_eos": True}))["choices"]
    assert (choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("length", 24)


async def test_a_stop_token_is_written_if_asked(client):
    ids = await ids_of(client, max_tokens=2)
    fields = GREEDY | {"stop_token_ids": [ids[0]]}
    first = (await said(client, **GREEDY))[0]
    assert (await client.complete(**fields))["choices"][0]["text"] == ""
    assert (await client.complete(**fields, include_stop_str_in_output=True))["choices"][0]["text"] == first


async def test_only_allowed_tokens_come_and_of_those_the_likeliest(client):
    ids = [40, 41, 97, 102]
    names = {(await client.ok("/detokenize", {"tokens": [i]}))["prompt"] for i in ids}
    assert set(await said(client, **DRAWN, allowed_token_ids=ids)) <= names
    [drawn] = {tuple(await said(client, **DRAWN, allowed_token_ids=ids[:1]))}
    assert len(drawn) == 24
    (choice,) = (await client.complete(**GREEDY | {"logprobs": 20}, allowed_token_ids=ids))["choices"]
    top = choice["logprobs"]["top_logprobs"][0]
    assert all(top[choice["logprobs"]["tokens"][0]] >= value for name, value in top.items() if name in names)
    # The end token is an ordinary token: it is drawn if it is allowed.
    ending = await client.complete(**GREEDY | {"ignore_eos": False}, allowed_token_ids=[2])
    assert (ending["choices"][0]["finish_reason"], ending["usage"]["completion_tokens"]) == ("stop", 1)
    # The minimum forbids the only allowed token, which is drawn all the same and ends the answer at the minimum.
    ending = await client.complete(**GREEDY | {"ignore_eos": False}, allowed_token_ids=[2], min_tokens=9)
    assert (ending["choices"][0]["finish_reason"], ending["usage"]["completion_tokens"]) == ("stop", 9)


async def test_bad_words_do_not_come_as_one_token_or_as_several(client):
    free = (await client.complete(**GREEDY, return_token_ids=True))["choices"][0]
    bad = []
    for start, length in ((0, 1), (4, 2), (9, 3)):
        part = (await client.ok("/detokenize", {"tokens": free["token_ids"][start : start + length]}))["prompt"]
        if "\ufffd" not in part:
            bad.append(part)
    assert bad
    for words in (bad[:1], bad):
        forbidden = [await ids_of_text(client, form) for word in words for form in (word.lstrip(), " " + word.lstrip())]
        for fields in (GREEDY, DRAWN):
            answer = await client.complete(**fields, bad_words=words, return_token_ids=True, n=2)
            for choice in answer["choices"]:
                found = choice["token_ids"]
                for ids in forbidden:
                    assert all(found[i : i + len(ids)] != ids for i in range(len(found)))
    # Bad words do not restrict the prompt, and an empty list changes nothing.
    assert (await client.complete(**GREEDY, bad_words=[]))["choices"][0]["text"] == free["text"]


async def ids_of_text(client, text: str) -> list[int]:
    return (await client.ok("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "guided_choice": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5] * (2**18 + 1)}, "allowed_token_ids"),
        ({"bad_words": ["x", 5]}, "bad_words[1]"),
    ],
)
async def test_rules_for_tokens_that_cannot_be_kept_are_refused(client, fields, param):
    status, answer = await client.post("/v1/completions", {"model": "tiny", "prompt": "x"} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_banned_word_gives_way_to_a_grammar(client):
    fields = {"prompt": PROMPT, "guided_choice": ["a", "b"], "temperature": 1}
    answer = await client.complete(**fields, bad_words=["a"], n=8)
    assert {choice["text"] for choice in answer["choices"]} == {"b"}
    only = await client.complete(**fields | {"guided_choice": ["a"]}, bad_words=["a"])
    assert only["choices"][0]["text"] == "a"


async def test_max_completion_tokens_is_chats(client):
    fields = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    assert (await client.chat(**fields, max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await client.chat(**fields, max_tokens=9, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


async def test_a_minimum_over_what_may_be_said_is_refused(client):
    status, answer = await client.post("/v1/completions", {"model": "tiny", "prompt": "x", "min_tokens": 17})
    assert (status, answer["error"]["param"]) == (400, "min_tokens")
