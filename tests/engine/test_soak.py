"""Random scripts of all features at once: a request's answer never depends on the other requests.

Prompts share prefixes, adapters do not all fit into memory, blocks run out, clients disconnect. Each answer equals the
one that the request gets alone, and at the end every block, seat and page is free.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from adapters.tiers.pages import PAGE_RANK
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams, TokenLogprobs
from testing.tiny import save_base_and_adapters

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, head_dim, fp32, tokens
RANKS = (3, PAGE_RANK, PAGE_RANK + 1, 2 * PAGE_RANK, 2 * PAGE_RANK)
NUM_REQUESTS = 30

Make = Callable[..., tuple[Engine, list[str | None]]]


@dataclass
class Ask:
    prompt: list[int]
    params: SamplingParams
    adapter: int
    fields: dict[str, Any]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base_and_adapters(tmp_path_factory.mktemp("tiny"), RANKS)


@pytest.fixture
def make_engine(model: Path, request: pytest.FixtureRequest) -> Make:
    """Return a factory of engines with the model names of requests. host_bytes: bytes of adapters in host memory."""

    def make(host_bytes: int = 1 << 20, **options: Any) -> tuple[Engine, list[str | None]]:
        host = HostCache(None, BaseShape.from_config_dir(model / "base"), host_bytes, torch.float32)
        request.addfinalizer(host.close)
        options = {
            "dtype": "float32", "device": "cpu", "max_lora_rank": 2 * PAGE_RANK, "adapter_memory": 4 << 20,
            "max_num_seqs": 6, "max_num_batched_tokens": 32, "kv_cache_memory": 64 * BLOCK_BYTES, **options,
        }  # fmt: skip
        engine = Engine(EngineConfig(model=str(model / "base"), **options), host)
        request.addfinalizer(engine.close)
        return engine, [None, *(host.add_path(model / f"adapter-{i}") for i in range(len(RANKS)))]

    return make


def script(rng: random.Random) -> list[Ask]:
    def text(length: int) -> list[int]:
        return [rng.randrange(3, 380) for _ in range(length)]

    beginnings = [text(40), text(40)]
    kinds: tuple[dict[str, Any], ...] = ({}, {}, {"prompt_logprobs": 1}, {"logprobs": 2}, {"temperature": 0.0})
    return [
        Ask(
            rng.choice(beginnings)[: rng.choice((1, 15, 16, 17, 40))] + text(rng.choice((0, 1, 9))),
            SamplingParams(
                max_tokens=rng.choice((1, 4, 25)), seed=rng.randrange(4), ignore_eos=True, **rng.choice(kinds)
            ),
            rng.randrange(1 + len(RANKS)),
            {"tenant_id": rng.choice("abc"), "priority": rng.choice((0, 0, 5)), "weight": rng.choice((0.5, 1.0, 3.0))},
        )
        for _ in range(NUM_REQUESTS)
    ]


def run(
    engine: Engine, names: list[str | None], asks: dict[str, Ask], rng: random.Random, leaving: dict[str, int]
) -> dict[str, Answer]:
    """Send the requests, a few at a time. leaving: tokens after which a request's client disconnects."""
    answers = {request_id: Answer() for request_id in asks}
    to_send = list(asks)
    while to_send or engine.has_work():
        if to_send and rng.random() < 0.3:
            ask = asks[to_send[0]]
            engine.add_request(
                NewRequest(to_send.pop(0), ask.prompt, ask.params, adapter_digest=names[ask.adapter], **ask.fields)
            )
        for request_id, enough in leaving.items():
            if len(answers[request_id].tokens) >= enough and rng.random() < 0.3:
                engine.abort(request_id)
        for output in engine.step():
            assert output.error is None
            answers[output.request_id].tokens += output.token_ids
            if (entries := output.prompt_logprobs) is not None:
                kept = answers[output.request_id].prompt_logprobs
                if entries[0] is None:  # the prompt begins, perhaps again
                    kept.clear()
                kept += entries
        if engine.is_waiting_for_adapters:
            time.sleep(0.001)
    return answers


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 10))])
def test_whoever_else_is_there_each_answer_is_the_one_alone(seed: int, make_engine: Make) -> None:
    rng = random.Random(seed)
    asks = {str(i): ask for i, ask in enumerate(script(rng))}
    leaving = {request_id: rng.choice((0, 1, 3)) for request_id in asks if rng.random() < 0.2}
    pages = rng.choice((2, 3, 4))
    options = {
        "host_bytes": rng.choice((1 << 20, 60_000)),
        "kv_cache_memory": rng.choice((7, 9, 14)) * BLOCK_BYTES,
        "max_model_len": 100,
        "max_num_batched_tokens": rng.choice((6, 16, 64)),
        "enable_chunked_prefill": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.5,
    }
    alone, names = make_engine(enable_prefix_caching=False, max_num_seqs=1)
    expected = run(alone, names, asks, rng, {})
    engine, names = make_engine(adapter_memory=pages * alone.adapters.page_bytes, **options)
    for request_id, answer in run(engine, names, asks, rng, leaving).items():
        if request_id in leaving:
            assert answer.tokens == expected[request_id].tokens[: len(answer.tokens)]
        else:
            assert answer == expected[request_id]
    state, pool = engine.state(), engine.adapters
    assert (state.num_running, state.num_waiting, state.num_free_blocks) == (0, 0, state.num_blocks)
    assert all(engine.unload_adapter(digest) for digest in state.resident_adapters)
    assert pool.num_free_pages == pool.num_pages
