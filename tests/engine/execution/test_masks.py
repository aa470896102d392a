"""Grammars on rows of logits: random models, one batch, and each text matches its own grammar."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.execution import masks
from engine.scheduling.request import NewRequest, Request, SamplingParams, Status
from engine.scheduling.token_rules import AllowedTokens
from engine.structured.compiler import LIMITS, GrammarCompiler
from kernels import reference
from kernels.cpu.plain import TorchOps
from testing.card import Card
from testing.sampling import sample_rows
from testing.tiny import save_byte_fallback_tokenizer, save_byte_level_tokenizer
from tests.engine.structured.schemas import SCHEMAS, fits
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer


class Vocabulary:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_dir(folder)
        # The logits are wider than the vocabulary, as in many models.
        self.width = self.tokenizer.vocab_size + 37
        self.compiler = GrammarCompiler(self.tokenizer.to_json, self.width, self.tokenizer.eos_token_ids)

    def request(self, kind: Any = None, text: Any = "", seed: int = 0, **params: Any) -> Request:
        grammar = None
        if kind is not None:
            text = text if isinstance(text, str) else json.dumps(text)
            grammar = self.compiler.compile(GrammarSpec(kind, text, param="guided_x"))
        settings = {"max_tokens": 400} | params
        return Request(
            NewRequest("r", [5], SamplingParams(grammar=grammar, **settings)),
            seed=seed,
            stop_ids=self.tokenizer.eos_token_ids,
        )

    def run(self, requests: list[Request], seed: int = 0) -> list[str]:
        """Generate all requests with a model of random logits, as the runner would."""
        generator = torch.Generator().manual_seed(seed)
        while live := [r for r in requests if r.status is not Status.FINISHED]:
            logits = torch.randn(len(live), self.width, generator=generator) * 3
            for request, token in zip(live, sample_rows(logits, live).tolist(), strict=True):
                request.append(token)
        return [self.tokenizer.decode(r.token_ids[1:]) for r in requests]


@pytest.fixture(scope="module", params=[save_byte_level_tokenizer, save_byte_fallback_tokenizer])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("tokenizer")
    request.param(folder)
    return Vocabulary(folder)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=3), seed=st.integers(0, 2**31), greedy=st.booleans())
def test_any_schema_gives_json_that_fits_it(
    vocabulary: Vocabulary, schemas: list[dict[str, Any]], seed: int, greedy: bool
) -> None:
    temperature = 0.0 if greedy else 1.0
    requests = [vocabulary.request("json", s, seed + i, temperature=temperature) for i, s in enumerate(schemas)]
    for text, request, schema in zip(vocabulary.run(requests, seed), requests, schemas, strict=True):
        assert request.finish_reason == "stop", text
        assert request.token_ids[-1] in vocabulary.tokenizer.eos_token_ids
        assert fits(json.loads(text), schema), (text, schema)


def test_rows_with_and_without_a_grammar_stand_in_one_batch(vocabulary: Vocabulary) -> None:
    free = [vocabulary.request(seed=i, max_tokens=40, ignore_eos=True, stop_token_ids=()) for i in range(2)]
    bound = [
        vocabulary.request("choice", ["red", "green", "blue"], 5),
        vocabulary.request("regex", "[ab]{3}x", 6, top_k=2),
        vocabulary.request("grammar", 'start: "1" ("2" | "3")', 7, temperature=0.0),
    ]
    texts = vocabulary.run([free[0], *bound, free[1]])
    assert texts[1] in ("red", "green", "blue")
    assert re.fullmatch("[ab]{3}x", texts[2])
    assert texts[3] in ("12", "13")
    assert all(request.finish_reason == "stop" for request in bound)


def test_a_free_row_is_untouched_and_a_bound_one_keeps_what_is_allowed(vocabulary: Vocabulary) -> None:
    logits = torch.randn(3, vocabulary.width, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    free, bound = vocabulary.request(temperature=0.0), vocabulary.request("regex", "a", temperature=0.0)
    sample_rows(logits, [free, bound, free])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    kept = logits[1] > -torch.inf
    assert torch.equal(logits[1][kept], before[1][kept])
    assert {vocabulary.tokenizer.token_bytes(i) for i in kept.nonzero()[:, 0].tolist()} == {b"a"}


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.999, 1.0])
def test_both_ways_to_apply_a_mask_are_what_it_says(share: float) -> None:
    allowed = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < share
    bits = np.packbits(np.resize(allowed.numpy(), 1024), bitorder="little").view(np.uint32)
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = torch.where(allowed, logits, -torch.inf)
    on_cpu = logits.clone()
    masks._forbid(on_cpu.numpy(), bits)
    on_device = logits[None].clone()
    reference.forbid(on_device, torch.tensor([0]), torch.from_numpy(bits.view(np.int32)[None]))
    assert torch.equal(on_cpu, expected)
    assert torch.equal(on_device[0], expected)


class DirtyCard(Card):
    """A device whose staging memory holds what an earlier step left."""

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), -1, dtype=dtype)


def masks_of(requests: Sequence[Request]) -> list[tuple[int, masks.Mask]]:
    return [(row, request.mask) for row, request in enumerate(requests) if request.mask is not None]


def test_masks_that_are_copied_to_a_device_are_those_of_the_host(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        vocabulary.request(),
        vocabulary.request("regex", "[ab]x"),
        vocabulary.request(allowed=AllowedTokens([3, 40])),
        vocabulary.request("json", {"type": "object"}),
    ]
    logits = torch.randn(4, vocabulary.width, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    masks.constrain(expected, masks_of(requests), TorchOps())
    monkeypatch.setattr(masks, "platform_of", lambda _: DirtyCard(1))
    masks.constrain(logits, masks_of(requests), TorchOps())
    assert torch.equal(logits, expected)
    assert (logits[2] > -torch.inf).sum() == 2


def test_choices_of_one_request_each_have_a_place_of_their_own(vocabulary: Vocabulary) -> None:
    grammar = vocabulary.compiler.compile(GrammarSpec("regex", "[a-z]{1,9}!"))
    params = SamplingParams(grammar=grammar, max_tokens=50)
    requests = [
        Request(NewRequest(str(i), [5], params), seed=i, stop_ids=vocabulary.tokenizer.eos_token_ids) for i in range(8)
    ]
    texts = vocabulary.run(requests)
    assert all(re.fullmatch("[a-z]{1,9}!", text) for text in texts), texts
    assert len(set(texts)) > 1


def test_the_end_is_allowed_where_the_grammar_accepts_and_only_there(vocabulary: Vocabulary) -> None:
    [end] = vocabulary.tokenizer.eos_token_ids
    request = vocabulary.request("regex", "ab?", temperature=0.0)
    wants_the_end = torch.zeros(1, vocabulary.width)
    wants_the_end[0, end] = 9.0
    [first] = sample_rows(wants_the_end.clone(), [request]).tolist()
    assert vocabulary.tokenizer.token_bytes(first) in (b"a", b"ab")
    request.append(first)
    assert sample_rows(wants_the_end.clone(), [request]).tolist() == [end]
    request.append(end)
    assert (request.status, request.finish_reason) == (Status.FINISHED, "stop")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_delays_the_end_but_not_past_the_grammars(vocabulary: Vocabulary, ignore_eos: bool) -> None:
    def run(regex: str, **params: Any) -> Request:
        request = vocabulary.request("regex", regex, min_tokens=6, ignore_eos=ignore_eos, **params)
        if ignore_eos:
            request.stop_ids = frozenset()
        vocabulary.run([request])
        return request

    assert run("[ab]*c", max_tokens=100).num_output_tokens > 0
    short = run("a")
    assert (short.finish_reason, short.num_output_tokens) == ("stop", 2)
    if not ignore_eos:
        assert run("a*", logit_bias=dict.fromkeys(vocabulary.tokenizer.eos_token_ids, 20.0)).num_output_tokens >= 6


def test_bias_penalties_and_stop_tokens_still_count(vocabulary: Vocabulary) -> None:
    ids = {vocabulary.tokenizer.token_bytes(i): i for i in range(vocabulary.tokenizer.vocab_size)}
    a, b, c = ids[b"a"], ids[b"b"], ids[b"c"]
    request = vocabulary.request("regex", "[abc]{30}", logit_bias={b: 100.0, c: -100.0}, temperature=0.0)
    [text] = vocabulary.run([request])
    assert text == "b" * 30
    request = vocabulary.request("regex", "[ab]{30}", logit_bias={a: 50.0}, temperature=0.0)
    request.stop_ids |= {a}
    vocabulary.run([request])
    assert (request.num_output_tokens, request.finish_reason) == (1, "stop")


def test_a_preempted_request_goes_on_where_it_was(vocabulary: Vocabulary) -> None:
    request, twin = (vocabulary.request("json", {"type": "integer", "minimum": 100}, seed=3) for _ in range(2))
    logits = torch.randn(200, vocabulary.width, generator=torch.Generator().manual_seed(1)) * 3
    for row in logits:
        for r in (request, twin):
            if r.status is not Status.FINISHED:
                r.append(int(sample_rows(row[None].clone(), [r])[0]))
        if request.status is not Status.FINISHED:
            request.preempt()
            request.start(0)
    assert request.token_ids == twin.token_ids
    assert request.finish_reason == "stop"


def test_a_grammar_past_its_limits_ends_its_own_request_only(vocabulary: Vocabulary) -> None:
    assert LIMITS["step_max_items"] <= 20_000
    ambiguous = 'start: s\ns: s s | s s s | "a" | "b" | ""'
    hostile = vocabulary.request("grammar", ambiguous, max_tokens=4000, min_tokens=4000)
    friend = vocabulary.request("choice", ["yes", "no"], 1)
    _, text = vocabulary.run([hostile, friend])
    assert text in ("yes", "no")
    assert hostile.finish_reason == "error"
    assert hostile.error_param == "guided_x"
    assert hostile.error is not None
    assert "guided_x" in hostile.error
