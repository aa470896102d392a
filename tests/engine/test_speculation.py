"""Speculative decoding changes no answer: whatever is proposed, every sampling feature gives the tokens that it gives
without drafts.
"""

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.scheduling.drafter import OTHERS, Drafter
from engine.scheduling.request import Grammar, NewRequest, Request, SamplingParams
from engine.speculative_config import SpeculativeConfig
from testing.engine import Client, RunningServer
from testing.speculation import VOCAB, always_drafting, run, sampling
from testing.tiny_engines import Make, engine_maker, regex_grammar, save_base_and_adapters

NGRAM = SpeculativeConfig("ngram", 5, prompt_lookup_min=1, prompt_lookup_max=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base_and_adapters(tmp_path_factory.mktemp("tiny"), 256)


@pytest.fixture(scope="module")
def grammar(tiny: Path) -> Grammar:
    return regex_grammar(tiny)


@pytest.fixture(scope="module")
def make_engine(tiny: Path, request: pytest.FixtureRequest) -> Make:
    return engine_maker(
        tiny, request, dtype="float32", device="cpu", max_lora_rank=8, adapter_memory=4 << 20, max_num_seqs=6,
        kv_cache_memory=1 << 20, max_num_batched_tokens=64, block_size=16,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "examples"),
    [
        ({"dtype": "float32"}, 12),
        ({"dtype": "bfloat16"}, 12),
        ({"dtype": "float32", "quantization": "int8"}, 5),
        ({"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"}, 5),
        ({"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}, 5),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_every_sampling_feature_answers_as_without(
    options: dict[str, Any], examples: int, make_engine: Make, grammar: Grammar, guesses: dict[str, list[int]]
) -> None:
    """In the native step of the CPU, answers are equal to the bit, whatever the form of weights, keys and values."""
    plain, digests = make_engine(**options)
    drafting, _ = make_engine(**options, speculative_config=NGRAM)
    decoder = drafting.runner.decoder  # type: ignore[attr-defined]
    assert decoder._fused is not None
    assert decoder.weights.layers[0].down.scheme.kind == options.get("quantization", "dense")

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        requests = []
        for i in range(data.draw(st.integers(1, 8))):
            prompt = data.draw(st.lists(st.integers(3, 99), min_size=1, max_size=40))
            requests.append(
                NewRequest(
                    str(i),
                    prompt,
                    sampling(data.draw, grammar),
                    adapter_digest=data.draw(st.sampled_from([None, *digests])),
                    adapter_start=data.draw(st.sampled_from([0, 0, len(prompt)])),
                    tenant_id=data.draw(st.sampled_from("ab")),
                )
            )
        expected = run(plain, requests)
        guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
        assert run(drafting, requests) == expected
        # A later turn finds the blocks of prompts and answers, and no block of a rejected draft.
        turns = [
            NewRequest(
                r.request_id, [*r.prompt_token_ids, *expected[r.request_id][0], 7], SamplingParams(temperature=0)
            )
            for r in requests
            if r.adapter_digest is None
        ]
        expected = run(plain, turns)
        guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
        assert run(drafting, turns) == expected

    # The drawn requests may be short, or all of one adapter. Hypothesis draws others after any change of the code.
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    whole = [NewRequest(str(i), [5, 9, 30 + i], params, adapter_digest=[None, *digests][i % 3]) for i in range(6)]
    expected = run(plain, whole)
    guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
    assert run(drafting, whole) == expected
    check()
    counts = {count.adapter: count for count in drafting.state().drafts}
    assert {"", *digests} == set(counts)
    assert all(0 < count.accepted < count.drafted for count in counts.values())
    assert drafting.state().num_steps < 0.8 * plain.state().num_steps


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_memory": 9 * 16 * 512, "max_model_len": 100},
        {"enable_prefix_caching": False, "max_num_seqs": 2, "preempt_behind": 0, "preempt_after": 0.0},
        {"max_num_batched_tokens": 8, "enable_chunked_prefill": True},
    ],
    ids=["blocks run out", "streams give way", "narrow steps"],
)
def test_pressure_on_blocks_seats_and_rows_changes_no_answer(
    options: dict[str, Any], make_engine: Make, guesses: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Admission expects no further blocks, so that they run out.
    monkeypatch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, requests: 0)
    requests = [
        NewRequest(
            str(i),
            [3 + (7 * i + j) % 370 for j in range(1 + 11 * (i % 4))],
            SamplingParams(max_tokens=40, temperature=float(i % 2), seed=i, ignore_eos=True, logprobs=1),
            tenant_id=f"tenant-{i % 3}",
        )
        for i in range(12)
    ]
    expected = run(make_engine()[0], requests)
    guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
    drafting, _ = make_engine(speculative_config=NGRAM, **options)
    found = run(drafting, requests)
    assert [answer[:2] for answer in found.values()] == [answer[:2] for answer in expected.values()]
    state = drafting.state()
    assert sum(count.accepted for count in state.drafts)
    assert state.num_preemptions or "max_num_batched_tokens" in options


def test_a_draft_that_computes_nan_voids_no_token_before_it(make_engine: Make, guesses: dict[str, list[int]]) -> None:
    """A poisoned draft makes the rows before it NaN; these are computed again without drafts."""
    requests = [NewRequest("0", [5, 6, 7], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1))]
    expected = run(make_engine()[0], requests)
    answer = expected["0"][0]
    poison = next(token for token in range(VOCAB) if token not in [5, 6, 7, *answer])
    drafting, _ = make_engine(speculative_config=NGRAM)
    drafting.runner.decoder.weights.embedding.tensors["weight"][poison] = torch.nan  # type: ignore[attr-defined]
    guesses["0"] = [*answer[:2], *[poison] * 10]
    assert run(drafting, requests) == expected


def test_the_server_answers_as_without(tiny: Path) -> None:
    """Stop strings, choices, echo and streams see several tokens at once."""
    bodies: list[dict[str, Any]] = [
        {"prompt": "a b a b a b a b", "max_tokens": 40},
        {"prompt": "The quick brown fox", "max_tokens": 40, "n": 3, "seed": 5, "temperature": 1.5, "logprobs": 2},
        {"prompt": ["def add", "naïve café"], "max_tokens": 30, "echo": True, "logprobs": 1},
        {"prompt": "a b a b", "max_tokens": 60, "stop": ["e", "z", "  "]},
        {"prompt": "a b a b", "max_tokens": 60, "stop": ["e"], "include_stop_str_in_output": True, "min_tokens": 5},
    ]
    answers = []
    with always_drafting():
        for config in ({}, {"speculative_config": NGRAM}):
            server = RunningServer(tiny / "base", config=config)
            try:
                answers.append(ask(server, bodies))
                drafts, metrics = server.core.engine.state().drafts, read_metrics(server)
            finally:
                server.close()
    for before, after in zip(*answers, strict=True):
        assert before == after
    [count] = drafts
    assert count.accepted, "the tiny model repeats itself"
    for name, number in (("draft_tokens", count.drafted), ("draft_tokens_accepted", count.accepted)):
        assert f'loraplex_engine_{name}_total{{adapter="base"}} {number:.1f}' in metrics


def ask(server: RunningServer, bodies: list[dict[str, Any]]) -> list[Any]:
    async def all_answers() -> list[Any]:
        async with aiohttp.ClientSession() as session:
            client = Client(session, server.url)
            found: list[Any] = []
            for body in bodies:
                answer = await client.complete(**body)
                found.append((answer["choices"], answer["usage"]))
                events = await client.events("/v1/completions", {"model": "tiny", "temperature": 0} | body)
                texts: dict[int, str] = {}
                for choice in (choice for event in events for choice in event["choices"]):
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                assert texts == {choice["index"]: choice["text"] for choice in answer["choices"]}
            return found

    return asyncio.run(all_answers())


def read_metrics(server: RunningServer) -> str:
    with urllib.request.urlopen(server.url + "/metrics") as response:
        return response.read().decode()


def test_counts_of_drafts_have_a_bounded_number_of_labels() -> None:
    drafter = Drafter(None, 5, None, None, 64)  # type: ignore[arg-type]
    for i in range(80):
        new = NewRequest("r", [1], SamplingParams(), adapter_digest=f"{i:064x}")
        drafter._count(Request(new))[0] += 1
    counts = {count.adapter: count.drafted for count in drafter.counts()}
    assert len(counts) == 51
    assert counts[OTHERS] == 30
