"""Each sampling parameter over HTTP: that it does what it says, whole and in a stream alike."""

import pytest

from tests.engine.server.test_generation import text_of

PROMPT = "The quick brown fox"
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}
DRAWN = {**GREEDY, "temperature": 1.5, "seed": 11}


async def said(client, **fields) -> list[str]:
    """The tokens of the one choice, the same in a stream."""
    (choice,) = (await client.complete(**fields))["choices"]
    events = await client.events("/v1/completions", {"model": "tiny", **fields})
    assert text_of(events) == choice["text"]
    streamed = [t for e in events for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["tokens"]]
    assert streamed == choice["logprobs"]["tokens"]
    return streamed


async def ids_of(client, **fields) -> list[int]:
    """Token ids of the greedy answer, by the likeliest at each place."""
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
    # The same set of tokens, drawn in another order: any number beyond the vocabulary is all of it.
    assert len(await said(client, **DRAWN, top_k=2**31 - 1)) == 24


async def test_bias_forces_and_forbids(client):
    ids = await ids_of(client, max_tokens=3)
    forced = await said(client, **GREEDY, logit_bias={str(ids[1]): 100})
    assert len(set(forced)) == 1
    free = await said(client, **GREEDY)
    (choice,) = (await client.complete(**GREEDY, logit_bias={str(i): -100 for i in ids}))["choices"]
    assert choice["logprobs"]["tokens"][0] != free[0]


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


async def test_max_completion_tokens_is_chats(client):
    fields = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    assert (await client.chat(**fields, max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await client.chat(**fields, max_tokens=9, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


async def test_a_minimum_over_what_may_be_said_is_refused(client):
    status, answer = await client.post("/v1/completions", {"model": "tiny", "prompt": "x", "min_tokens": 17})
    assert (status, answer["error"]["param"]) == (400, "min_tokens")
