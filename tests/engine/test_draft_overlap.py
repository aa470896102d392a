"""Speculation with async scheduling: steps without drafts overlap with planning, and no answer changes."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_times import StepTimes
from engine.scheduling.token_rules import AllowedTokens
from engine.speculative_config import SpeculativeConfig
from testing.engine import outputs_until_idle
from testing.speculation import always_drafting, run
from testing.tiny_engines import Make, engine_maker, save_base_and_adapters
from testing.virtual_engine import HOST_S, VirtualEngine

NGRAM = SpeculativeConfig("ngram", 5)
STEP_S, ROW_S = 0.004, 0.0001


@pytest.fixture
def make_engine(tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    return engine_maker(save_base_and_adapters(tmp_path, 1024), request, kv_cache_memory=1 << 30, max_num_seqs=32)


def tokens_per_second(
    make_engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, object],
    speculation: SpeculativeConfig | None = NGRAM,
    *,
    is_async: bool | None = None,
) -> float:
    """Return the output tokens a second of eight streams in 3 s of virtual time."""
    with monkeypatch.context() as patch:
        engine = VirtualEngine(
            make_engine,
            patch,
            device=f"simulated:{1000 * STEP_S},{1000 * ROW_S}",
            speculative_config=speculation,
            async_scheduling=is_async,
        )
        engine.sampling = sampling
        for _ in range(8):
            engine.arrive(0.0, "t", 16, 900, is_closed=True)
        engine.run(3.0)
    return engine.service["t"] / 2 / 3


def test_text_that_repeats_nothing_is_as_fast_as_without_speculation(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    varied, repeated = {"seed": 1}, {"allowed": AllowedTokens([7])}
    without = tokens_per_second(make_engine, monkeypatch, varied, None)
    assert without == pytest.approx(8 / (STEP_S + 8 * ROW_S), rel=0.03), "the host's work is hidden"
    assert tokens_per_second(make_engine, monkeypatch, varied) > 0.98 * without
    without_overlap = tokens_per_second(make_engine, monkeypatch, varied, is_async=False)
    assert without_overlap == pytest.approx(8 / (HOST_S + STEP_S + 8 * ROW_S), rel=0.03)
    assert tokens_per_second(make_engine, monkeypatch, repeated) > 2.5 * without


def test_an_abort_while_drafts_are_in_flight_touches_nobody_else(
    make_engine: Make, guesses: dict[str, list[int]]
) -> None:
    requests = [
        NewRequest(
            str(i), [5, 9, 30 + i], SamplingParams(max_tokens=60, seed=i, ignore_eos=True, logprobs=[None, 1][i % 2])
        )
        for i in range(8)
    ]
    expected = run(make_engine(device="simulated:0,0")[0], requests)
    guesses.update({request_id: answer[0] for request_id, answer in expected.items()})
    engine, _ = make_engine(device="simulated:0,0", speculative_config=NGRAM)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    with_drafts = 0
    for request in requests:
        engine.add_request(request)
    for output in outputs_until_idle(engine):
        found[output.request_id] += output.token_ids
        step = engine._in_flight
        if output.request_id in "26" and len(found[output.request_id]) > 20 and step is not None and step.launched:
            with_drafts += output.request_id in engine.scheduler.requests
            engine.abort(output.request_id)
    assert with_drafts == 2
    for request_id, answer in expected.items():
        tokens = found[request_id]
        assert tokens == (answer[0][: len(tokens)] if request_id in "26" else answer[0])
    state = engine.state()
    assert state.num_free_blocks == state.num_blocks


def test_a_draft_model_beside_steps_that_overlap_changes_no_answer(
    tmp_path: Path, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts pay in a part of the steps only, so the newest tokens are in flight in some plans, and known in others."""
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "kv_cache_memory": 4 << 20, "max_model_len": 128,
        "adapter_memory": 1 << 20,
    }  # fmt: skip
    requests = [
        NewRequest(
            str(i),
            [5, 9, 30 + i],
            SamplingParams(max_tokens=40, temperature=i % 2, seed=i, ignore_eos=True, presence_penalty=i // 4),
        )
        for i in range(6)
    ]
    expected = run(make_engine(**options)[0], requests)
    speculation = SpeculativeConfig("draft_model", 3, model=str(tmp_path / "base"))
    rng, plans = random.Random(0), Counter[bool]()
    original = Scheduler.schedule

    def schedule(scheduler: Scheduler, *, may_draft: bool) -> dict[Request, int]:
        plans[may_draft] += 1
        return original(scheduler, may_draft=may_draft)

    with always_drafting() as patch:
        patch.setattr(StepTimes, "may_draft", lambda *_: rng.random() < 0.5)
        patch.setattr(Scheduler, "schedule", schedule)
        engine, _ = make_engine(**options, speculative_config=speculation, async_scheduling=True)
        assert run(engine, requests) == expected
    [count] = engine.state().drafts
    assert count.accepted > 0.9 * count.drafted > 0
    assert min(plans[True], plans[False]) > 3
