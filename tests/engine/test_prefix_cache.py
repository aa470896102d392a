"""Shared blocks change no answer: with chunks, without free blocks, and beside aborts."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, RequestOutput, SamplingParams
from testing.engine import outputs_until_idle, whole_prompt_logprobs
from testing.tiny import save_adapter, save_model

BLOCK = 16
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * BLOCK  # keys and values, layers, heads, head_dim, fp32, tokens

Make = Callable[..., tuple[Engine, list[str | None]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "base", max_model_len=256)
    for i in range(2):
        save_adapter(folder / f"adapter-{i}", rank=4, seed=i)
    return folder


@pytest.fixture
def make_engine(model: Path, request: pytest.FixtureRequest) -> Make:
    """Return a factory of engines, each with the model names of requests: the base model and two adapters."""

    def make(**options: Any) -> tuple[Engine, list[str | None]]:
        host = HostCache(None, BaseShape.from_config_dir(model / "base"), 1 << 20, torch.float32)
        request.addfinalizer(host.close)
        options = {
            "dtype": "float32", "device": "cpu", "block_size": BLOCK, "max_lora_rank": 8, "adapter_memory": 4 << 20,
            "max_num_seqs": 6, "kv_cache_memory": 256 * BLOCK_BYTES, "max_num_batched_tokens": 32, **options,
        }  # fmt: skip
        engine = Engine(EngineConfig(model=str(model / "base"), **options), host)
        request.addfinalizer(engine.close)
        return engine, [None, *(host.add_path(model / f"adapter-{i}") for i in range(2))]

    return make


def answers(engine: Engine, aborts: dict[str, int] | None = None) -> dict[str, list[RequestOutput]]:
    """Run until no work is left. aborts: output tokens after which a request's client disconnects."""
    said: dict[str, list[RequestOutput]] = {}
    for output in outputs_until_idle(engine):
        assert output.error is None
        said.setdefault(output.request_id, []).append(output)
        if aborts is not None and output.num_output_tokens == aborts.get(output.request_id):
            engine.abort(output.request_id)
    assert engine.state().num_free_blocks == engine.state().num_blocks
    return said


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_shared_blocks_change_no_answer(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of several tenants and adapters with equal beginnings share a cache that holds two of them."""
    # Admission expects no further blocks, so that they run out.
    monkeypatch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, requests: 0)
    scripted = random.Random(5)
    beginnings = [[scripted.randrange(3, 380) for _ in range(40)] for _ in range(2)]
    asked = []
    for _ in range(36):
        beginning = scripted.choice(beginnings)[: scripted.choice((15, 16, 32, 40))]
        ending = [scripted.randrange(3, 380) for _ in range(scripted.choice((0, 1, 9)))]
        params = SamplingParams(seed=scripted.randrange(4), max_tokens=scripted.choice((1, 4, 20)), ignore_eos=True)
        asked.append((beginning + ending, params, scripted.randrange(3), scripted.choice("ab")))
    aborts = {str(i): scripted.choice((1, 2, 5)) for i in range(0, len(asked), 5)}

    def ask(engine: Engine, names: list[str | None], i: int) -> None:
        prompt, params, adapter, tenant_id = asked[i]
        engine.add_request(NewRequest(str(i), prompt, params, adapter_digest=names[adapter], tenant_id=tenant_id))

    alone, names = make_engine(enable_prefix_caching=False)
    expected: dict[str, list[int]] = {}
    for i in range(len(asked)):
        ask(alone, names, i)
        expected[str(i)] = tokens(answers(alone)[str(i)])[: aborts.get(str(i))]
    assert alone.state().prefix_hit_tokens == 0
    for async_scheduling in (False, True):
        # No timing is involved (adapters are loaded, prompts not paced), so the same blocks run out in every run.
        engine, names = make_engine(
            kv_cache_memory=10 * BLOCK_BYTES, max_model_len=128, max_num_batched_tokens=16, prefill_stretch=1e9,
            async_scheduling=async_scheduling,
        )  # fmt: skip
        for name in names:
            engine.add_request(NewRequest(f"warm {name}", [2], SamplingParams(max_tokens=1), adapter_digest=name))
        answers(engine)
        for first in range(0, len(asked), 12):
            for i in range(first, first + 12):
                ask(engine, names, i)
            for request_id, said in answers(engine, aborts).items():
                assert tokens(said) == expected[request_id]
                assert all(0 <= output.num_cached_tokens < output.num_prompt_tokens for output in said)
        assert engine.state().prefix_hit_tokens > 0
        assert engine.state().num_preemptions > 0


def test_a_prompt_in_chunks_reports_what_was_cached_when_it_began(make_engine: Make) -> None:
    engine, _ = make_engine(max_num_batched_tokens=8)
    prompt = list(range(3, 73))
    for cached, asked in ((0, prompt[:40]), (32, prompt), (64, prompt), (64, [*prompt, 5])):
        engine.add_request(NewRequest("r", asked, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)))
        assert {output.num_cached_tokens for output in answers(engine)["r"]} == {cached}


def test_choices_of_one_prompt_share_its_blocks_once_they_are_there(make_engine: Make) -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for i in range(3):
        params = SamplingParams(max_tokens=3, seed=i, ignore_eos=True)
        engine.add_request(NewRequest(f"choice-{i}", list(range(3, 40)), params))
    said = answers(engine)
    assert [said[f"choice-{i}"][0].num_cached_tokens for i in range(3)] == [0, 32, 32]


def test_prompt_logprobs_are_whole_whatever_is_cached(make_engine: Make) -> None:
    """A prompt with logprobs needs every position's logits, so it is computed in full; its blocks are then shared."""
    engine, _ = make_engine()
    prompt = list(range(3, 70))

    def ask(prompt_logprobs: int | None) -> RequestOutput:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=prompt_logprobs)
        engine.add_request(NewRequest("r", prompt, params))
        outputs = answers(engine)["r"]
        return outputs[-1]._replace(prompt_logprobs=whole_prompt_logprobs(outputs))

    first = ask(2)
    assert ask(None).num_cached_tokens == 64
    again = ask(2)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 0)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert len(first.prompt_logprobs or []) == len(prompt)
    assert ask(None).num_cached_tokens == 64


def test_prompt_logprobs_are_whole_where_their_prompt_is_preempted(make_engine: Make) -> None:
    prompt = [3 + 7 * i % 370 for i in range(100)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    whole, _ = make_engine()
    whole.add_request(NewRequest("prompt", prompt, params))
    expected = whole_prompt_logprobs(answers(whole)["prompt"])
    assert len(expected) == len(prompt)
    engine, _ = make_engine(
        kv_cache_memory=8 * BLOCK_BYTES, max_model_len=120, max_num_batched_tokens=8, prefill_stretch=1e9,
        preempt_after=3600.0,
    )  # fmt: skip
    engine.add_request(NewRequest("stream", prompt[:6], SamplingParams(max_tokens=30, ignore_eos=True), tenant_id="a"))
    engine.step()
    engine.add_request(NewRequest("prompt", prompt, params, tenant_id="b"))
    found = answers(engine)["prompt"]
    assert engine.state().num_preemptions == 1
    assert whole_prompt_logprobs(found) == expected
