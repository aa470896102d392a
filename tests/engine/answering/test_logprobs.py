"""Served log-probabilities against log_softmax of transformers' logits, in fp32, in each format of the API."""

import json
from typing import Any

import pytest
import torch

from engine.execution.sampler import token_logprobs
from testing.engine import Client, RunningServer
from testing.tiny import save_model
from tests.engine.answering.test_generation import text_of
from wire.text.tokenizer import Tokenizer

PROMPT = "Grüße 🎉 from the fox"
MESSAGES = [{"role": "user", "content": PROMPT}]
CLOSE = {"abs": 2e-3}


@pytest.fixture(scope="module")
def reference(model):
    """Return log-probabilities `[len(ids), vocab]` for ids: row i is of the token after ids[i]."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(ids: list[int]) -> torch.Tensor:
        return theirs(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


async def tokens_of(client, prompt: str) -> list[int]:
    return (await client.ok("/tokenize", {"prompt": prompt}))["tokens"]


def answer_ids(ids: list[int], reference: Any, num: int) -> list[int]:
    """Return the greedy continuation by transformers' own logits."""
    ids = list(ids)
    for _ in range(num):
        ids.append(int(reference(ids)[-1].argmax()))
    return ids


async def test_echoed_prompt_and_answer(client, reference, model):
    tokenizer = Tokenizer.from_dir(model)
    prompt = await tokens_of(client, PROMPT)
    ids = answer_ids(prompt, reference, 6)
    truth = reference(ids)
    fields = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "echo": True, "logprobs": 3}
    (choice,) = (await client.complete(**fields))["choices"]
    said = choice["logprobs"]
    assert len(said["tokens"]) == len(ids)
    assert said["token_logprobs"][0] is None
    assert said["top_logprobs"][0] is None
    expected = [truth[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
    assert said["token_logprobs"][1:] == pytest.approx(expected, **CLOSE)
    for i, top in enumerate(said["top_logprobs"][1:]):
        wanted: dict[str, float] = {}
        # Tokens with the same text share one entry: the chosen token's, else the most likely one's.
        for token_id in [ids[i + 1], *truth[i].topk(3).indices.tolist()]:
            wanted.setdefault(tokenizer.token_bytes(token_id).decode("utf-8", "replace"), truth[i, token_id].item())
        assert top == pytest.approx(wanted, **CLOSE)
    events = await client.events("/v1/completions", {"model": "tiny", "temperature": 0, **fields})
    assert text_of(events) == choice["text"]
    streamed = [c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
    assert streamed  # the number of parts depends on the time between the server's steps
    for field, values in said.items():
        assert [v for part in streamed for v in part[field]] == values


async def test_offsets_are_places_in_the_text(client):
    fields = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 1.5, "seed": 4, "logprobs": 0}
    for echo in (False, True):
        (choice,) = (await client.complete(**fields, echo=echo))["choices"]
        said, text = choice["logprobs"], choice["text"]
        assert said["text_offset"] == sorted(said["text_offset"])
        checked = 0
        for token, at in zip(said["tokens"], said["text_offset"], strict=True):
            if token.isascii() and not token.startswith("<|"):
                assert text[at : at + len(token)] == token
                checked += 1
        assert checked > 10


@pytest.mark.parametrize("form", ["text", "ids"])
async def test_offsets_of_a_prompt_with_special_tokens(client, form):
    text = "<|start|><|start|>user\nnaïve<|end|>\n"
    ids = (await client.ok("/tokenize", {"prompt": text}))["tokens"]
    fields = {
        "prompt": text if form == "text" else ids,
        "max_tokens": 3,
        "ignore_eos": True,
        "logprobs": 0,
        "echo": True,
    }
    # A text prompt is echoed unchanged; an ids prompt without its special tokens.
    echoed = text if form == "text" else "user\nnaïve\n"
    (choice,) = (await client.complete(**fields))["choices"]
    assert choice["text"].startswith(echoed)
    logprobs = choice["logprobs"]
    for name, offset in zip(logprobs["tokens"][: len(ids)], logprobs["text_offset"], strict=False):
        hidden = form == "ids" and name.startswith("<|")
        assert hidden or "\ufffd" in name or choice["text"][offset:].startswith(name)
    assert logprobs["text_offset"][len(ids)] == len(echoed)


async def test_a_token_that_the_tokenizer_puts_before_a_prompt_stands_at_its_begin(session, tmp_path):
    save_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    start = {"SpecialToken": {"id": "<|start|>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [1], "tokens": ["<|start|>"]}},
    }
    file.write_text(json.dumps(content))
    running = RunningServer(tmp_path)
    try:
        client = Client(session, running.url)
        for prompt, offsets in (("ab", [0, 0]), ("<|start|>ab", [0, 0, 9])):
            fields = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "logprobs": 0, "echo": True}
            (choice,) = (await client.complete(**fields))["choices"]
            assert choice["logprobs"]["text_offset"][: len(offsets)] == offsets
    finally:
        running.close()


async def test_chat_with_the_chosen_and_the_likeliest(client, reference):
    prompt = (await client.ok("/tokenize", {"messages": MESSAGES}))["tokens"]
    ids = answer_ids(prompt, reference, 5)
    truth = reference(ids)[len(prompt) - 1 :]
    fields = {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, "logprobs": True, "top_logprobs": 4}
    # Penalties and bias change the drawn token, not the reported logprobs.
    for extra in ({}, {"logit_bias": {str(ids[-1]): 0.001}, "presence_penalty": 1e-6}):
        content = (await client.chat(**fields, **extra))["choices"][0]["logprobs"]["content"]
        for i, entry in enumerate(content):
            assert entry["logprob"] == pytest.approx(truth[i, ids[len(prompt) + i]].item(), **CLOSE)
            top = [t["logprob"] for t in entry["top_logprobs"]]
            assert top == pytest.approx(truth[i].topk(4).values.tolist(), **CLOSE)
            assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]


async def test_prompt_logprobs_in_vllms_form(client, reference):
    prompt = await tokens_of(client, PROMPT)
    truth = reference(prompt)
    (choice,) = (await client.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=2))["choices"]
    assert choice["logprobs"] is None
    assert PROMPT not in choice["text"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    for i, place in enumerate(others):
        own = place[str(prompt[i + 1])]
        assert own["logprob"] == pytest.approx(truth[i, prompt[i + 1]].item(), **CLOSE)
        assert own["rank"] == int((truth[i] > truth[i, prompt[i + 1]]).sum()) + 1
        assert {int(k) for k, v in place.items() if v["rank"] <= 2} == set(truth[i].topk(2).indices.tolist())
        assert len(place) == (2 if own["rank"] <= 2 else 3)
    chat = await client.chat(messages=MESSAGES, max_tokens=1, prompt_logprobs=0, n=2)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(place) == 1 for place in chat["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in await client.chat(messages=MESSAGES, max_tokens=1)


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, "def add(a: int, b: int)"]])
async def test_the_choices_of_a_prompt_share_its_logprobs(client, monkeypatch, prompts):
    rows = []

    def counted(logits, token_ids, most):
        rows.append(len(token_ids))
        return token_logprobs(logits, token_ids, most)

    monkeypatch.setattr("engine.execution.runner.token_logprobs", counted)
    fields = {"max_tokens": 3, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    alone = [await client.complete(prompt=prompt, prompt_logprobs=2, **fields) for prompt in prompts]
    of_one_choice, rows[:] = sum(rows), []
    assert of_one_choice
    together = await client.complete(prompt=prompts, n=4, prompt_logprobs=2, **fields)
    assert sum(rows) == of_one_choice
    expected = [answer["choices"][0]["prompt_logprobs"] for answer in alone for _ in range(4)]
    for choice, theirs in zip(together["choices"], expected, strict=True):
        for place, wanted in zip(choice["prompt_logprobs"][1:], theirs[1:], strict=True):
            assert {k: v["logprob"] for k, v in place.items()} == pytest.approx(
                {k: v["logprob"] for k, v in wanted.items()}, **CLOSE
            )
    assert len({choice["text"] for choice in together["choices"][:4]}) > 1

    # A stream puts the echoed prompt before each choice, whichever choice is ready first.
    echoed = {"prompt": prompts, "n": 4, "echo": True, "logprobs": 1, **fields}
    whole = await client.complete(**echoed)
    events = await client.events("/v1/completions", {"model": "tiny", **echoed})
    for choice in whole["choices"]:
        pieces = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        tokens = [t for piece in pieces if piece["logprobs"] for t in piece["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]


async def test_both_kinds_at_once_keep_their_own_numbers(client):
    fields = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, "echo": True, "logprobs": 1}
    (choice,) = (await client.complete(**fields, prompt_logprobs=5))["choices"]
    (without,) = (await client.complete(**fields))["choices"]
    assert choice["logprobs"] == without["logprobs"]
    assert all(5 <= len(place) <= 6 for place in choice["prompt_logprobs"][1:])
