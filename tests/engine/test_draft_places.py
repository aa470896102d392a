"""Places after drafts: those of plain requests are sampled together, the others one after the other, in one step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.execution import runner as runner_module
from engine.execution.simulated import SimulatedTokens
from engine.execution.transfer import Download
from engine.scheduling.request import Grammar, NewRequest, Request, SamplingParams
from engine.speculative_config import SpeculativeConfig
from kernels.platform import platform_of
from testing.card import Card
from testing.speculation import VOCAB, run, sampling
from testing.tiny_engines import Make, engine_maker, regex_grammar, save_base_and_adapters

NGRAM = SpeculativeConfig("ngram", 5, prompt_lookup_min=1, prompt_lookup_max=3)
SIMULATED = {"device": "simulated:0,0", "dtype": "auto"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base_and_adapters(tmp_path_factory.mktemp("tiny"), 256)


@pytest.fixture(scope="module")
def grammar(tiny: Path) -> Grammar:
    return regex_grammar(tiny)


@pytest.fixture
def make_engine(tiny: Path, request: pytest.FixtureRequest) -> Make:
    return engine_maker(
        tiny, request, dtype="float32", device="cpu", max_lora_rank=8, adapter_memory=4 << 20, max_num_seqs=6,
        kv_cache_memory=1 << 20, max_num_batched_tokens=64, max_model_len=128, block_size=16,
    )  # fmt: skip


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Return a list that receives the name of the method at each of its calls."""
    calls: list[str] = []
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return original(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize(
    ("options", "reads"), [({}, (Download, "wait")), (SIMULATED, (SimulatedTokens, "wait"))], ids=["real", "simulated"]
)
def test_a_step_of_plain_requests_reads_the_device_once(
    options: dict[str, Any],
    reads: tuple[type, str],
    make_engine: Make,
    guesses: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requests(**params: Any) -> list[NewRequest]:
        return [
            NewRequest(
                str(i),
                [5, 9, 30 + i],
                SamplingParams(max_tokens=40, temperature=i % 2, seed=i, ignore_eos=True, **(params if i == 2 else {})),
                adapter_digest=digests[i] if i < 2 else None,
            )
            for i in range(4)
        ]

    plain, digests = make_engine(**options)
    drafting, _ = make_engine(**options, speculative_config=NGRAM)
    found = []
    for batch in (requests(), requests(repetition_penalty=1.2)):
        expected = run(plain, batch)
        guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
        before = drafting.state().num_steps, sum(count.accepted for count in drafting.state().drafts)
        with monkeypatch.context() as patch:
            calls = count_calls(patch, *reads)
            assert run(drafting, batch) == expected
        steps = drafting.state().num_steps - before[0]
        assert sum(count.accepted for count in drafting.state().drafts) - before[1] > steps
        found.append((len(calls), steps))
    assert found[0][0] == found[0][1]
    assert found[1][0] > found[1][1], "a penalty depends on the tokens before"


def plain_sampling(draw: Callable[[st.SearchStrategy[Any]], Any]) -> SamplingParams:
    """Draw parameters of a plain request."""
    return SamplingParams(
        max_tokens=draw(st.integers(1, 24)),
        temperature=draw(st.sampled_from([0.0, 0.7, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 3, 9])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        seed=draw(st.one_of(st.none(), st.integers(0, 2**40))),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=30))),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        ignore_eos=draw(st.booleans()),
    )


def device_platform(device: torch.device) -> Any:
    """Return the CPU's platform with the tables that a GPU's seats have."""
    return Card(1 << 30) if device.type == "cpu" else platform_of(device)


@pytest.mark.parametrize(("kind", "examples"), [("host", 5), ("tables", 4), ("simulated", 20)])
def test_plain_and_other_requests_in_one_step_answer_as_without(
    kind: str,
    examples: int,
    make_engine: Make,
    grammar: Grammar,
    guesses: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tables: as on a GPU, penalties and masks are in tables of the seats, and steps without drafts overlap."""
    options: dict[str, Any] = SIMULATED if kind == "simulated" else {}
    plain, digests = make_engine(**options)
    if kind == "tables":
        monkeypatch.setattr(runner_module, "platform_of", device_platform)
        options = {"async_scheduling": True}
    drafting, _ = make_engine(**options, speculative_config=NGRAM)
    assert kind == "simulated" or (drafting.runner._sampling.tokens is not None) == (kind == "tables")  # type: ignore[attr-defined]

    def compare(requests: list[NewRequest]) -> None:
        expected = run(plain, requests)
        guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
        assert run(drafting, requests) == expected

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        compare(
            [
                NewRequest(
                    str(i),
                    data.draw(st.lists(st.integers(3, 99), min_size=1, max_size=40)),
                    plain_sampling(data.draw) if data.draw(st.booleans()) else sampling(data.draw, grammar),
                    adapter_digest=data.draw(st.sampled_from([None, *digests])),
                    tenant_id=data.draw(st.sampled_from("ab")),
                )
                for i in range(data.draw(st.integers(2, 8)))
            ]
        )

    mixes = watch_mixes(monkeypatch, type(drafting.runner))
    penalised = SamplingParams(max_tokens=24, temperature=0, repetition_penalty=1.2, ignore_eos=True)
    others = [NewRequest(str(i), [5, 9, 30 + i], penalised) for i in range(2)]
    compare(others)
    compare([NewRequest("2", [5, 9, 40], replace(penalised, repetition_penalty=1.0)), *others])
    check()
    assert mixes == {True, False}, "steps in which some requests are sampled again, and others not"
    assert all(0 < count.accepted < count.drafted for count in drafting.state().drafts)


def watch_mixes(monkeypatch: pytest.MonkeyPatch, runner: Any) -> set[bool]:
    """Return a set that receives whether the other requests of a step are plain, of each sampling after a draft."""
    found: set[bool] = set()
    original = runner.sample_after_drafts

    def watched(self: Any, launched: Any, requests: list[Request], number: int) -> Any:
        assert not any(request.is_plain for request in requests)
        found.add(any(request.is_plain and request.num_drafted for request in launched.layout.sampled))
        return original(self, launched, requests, number)

    monkeypatch.setattr(runner, "sample_after_drafts", watched)
    return found


def test_a_draft_that_computes_nan_voids_no_token_of_a_plain_request(
    make_engine: Make, guesses: dict[str, list[int]]
) -> None:
    requests = [NewRequest("0", [5, 6, 7], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))]
    expected = run(make_engine()[0], requests)
    answer = expected["0"][0]
    poison = next(token for token in range(VOCAB) if token not in [5, 6, 7, *answer])
    drafting, _ = make_engine(speculative_config=NGRAM)
    drafting.runner.decoder.weights.embedding.tensors["weight"][poison] = torch.nan  # type: ignore[attr-defined]
    guesses["0"] = [*answer[:2], *[poison] * 10]
    assert run(drafting, requests) == expected
