"""Counts of the steps with drafts, and of those without by reason."""

from pathlib import Path

import pytest

from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.step_times import STEPS_UNTIL_PLAIN, StepTimes
from engine.speculative_config import SpeculativeConfig
from testing.speculation import always_drafting, run
from testing.tiny import save_model
from testing.tiny_engines import Make, engine_maker, save_base_and_adapters
from tests.engine.scheduling.test_drafting import make

TEXT = [1, 2, 3, 4, 5, 6, 7]


def outcome_of(before: dict[str, int], after: dict[str, int]) -> str:
    """Return the outcome of the one step between two readings."""
    [(outcome, number)] = ((name, n - before.get(name, 0)) for name, n in after.items() if n != before.get(name, 0))
    assert number == 1
    return outcome


def test_a_step_is_counted_by_its_drafts() -> None:
    scheduler, drafter, request = make(TEXT)
    assert not drafter.outcomes(), "a step without decodes"
    assert scheduler.schedule(), "a step with drafts"
    assert request.num_drafted
    assert drafter.outcomes() == {"drafted": 1}


def test_a_step_whose_text_has_no_earlier_occurrence_has_no_proposal() -> None:
    scheduler, drafter, request = make(TEXT)
    drafter.end_step()
    scheduler.advance(scheduler.schedule())
    before = drafter.outcomes()
    scheduler.commit({request: 50})
    drafter.confirm([request])
    drafter.end_step()
    scheduler.schedule()
    assert outcome_of(before, drafter.outcomes()) == "no_proposal"


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_a_step_whose_drafts_cost_too_much_is_counted(is_in_flight: bool) -> None:
    """In general, and for a request whose drafts are rarely right."""
    scheduler, drafter, request = make(TEXT)

    def outcome() -> str:
        before = drafter.outcomes()
        if is_in_flight:
            assert not drafter.expects([request])
        scheduler.schedule(may_draft=not is_in_flight)
        assert not request.num_drafted
        return outcome_of(before, drafter.outcomes())

    for _ in range(20):
        drafter._times.observe(1.8, 1, 1, 1, False)
    assert drafter._times.pays(1.0, 1, 0, 1.0)
    assert outcome() == "cost"
    for _ in range(20):
        drafter._times.observe(3.0, 1, 1, 1, False)
    assert not drafter._times.pays(1.0, 1, 0, 1.0)
    assert outcome() == "cost"
    for _ in range(STEPS_UNTIL_PLAIN):
        drafter._times.observe(3.0, 1, 1, 1, False)
    assert outcome() == "measuring"


def test_a_step_with_a_prompt_is_counted_as_such() -> None:
    scheduler, drafter, request = make(TEXT, max_tokens=4)
    other = Request(NewRequest("o", [8, 9], SamplingParams(max_tokens=2), tenant_id="t"))
    scheduler.add(other)
    assert drafter.expects([request])
    assert scheduler.schedule() == {request: 1, other: 2}
    assert drafter.outcomes() == {"prompts": 1}


def test_a_step_without_rows_or_blocks_for_drafts_has_no_room() -> None:
    scheduler, drafter, _ = make(TEXT)
    drafter._most_rows = 1
    scheduler.schedule()
    assert drafter.outcomes() == {"no_room": 1}
    scheduler, drafter, request = make([*range(13), 0, 1])
    for i in range(2):
        other = Request(NewRequest(f"o{i}", [7] * 7, SamplingParams(), tenant_id="t"))
        assert scheduler.cache.grow(other, 8)
    assert scheduler.schedule() == {request: 1}
    assert drafter.outcomes() == {"no_room": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base model, and a smaller model of the same vocabulary with a shorter context."""
    folder = save_base_and_adapters(tmp_path_factory.mktemp("tiny"), 256, ranks=())
    save_model(folder / "short", max_model_len=32, hidden=32, head_dim=16, seed=7)
    return folder


@pytest.fixture(scope="module")
def make_engine(tiny: Path, request: pytest.FixtureRequest) -> Make:
    return engine_maker(
        tiny, request, dtype="float32", device="cpu", max_lora_rank=8, adapter_memory=4 << 20, max_num_seqs=6,
        kv_cache_memory=2 << 20, max_num_batched_tokens=64, block_size=16,
    )  # fmt: skip


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("draft", "credit", "expected"), [
    ("base", True, {"drafted"}), ("base", False, {"catching_up"}), ("short", True, {"no_proposal"}),
])  # fmt: skip
def test_a_draft_model_says_what_holds_it_back(
    draft: str, credit: bool, expected: set[str], is_async: bool, tiny: Path, make_engine: Make
) -> None:
    """Without credit it may not compute the prompt, and a shorter context than the prompt leaves it without drafts."""
    speculation = SpeculativeConfig("draft_model", 4, model=str(tiny / draft))
    engine, _ = make_engine(speculative_config=speculation, async_scheduling=is_async)
    with always_drafting() as patch:
        patch.setattr(StepTimes, "may_catch_up", lambda *_: credit)
        params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        run(engine, [NewRequest("0", [3 + 7 * i % 370 for i in range(50)], params)])
    state = engine.state()
    steps = dict(state.draft_steps)
    assert bool(sum(count.drafted for count in state.drafts)) == ("drafted" in expected)
    assert sum(steps.values()) == state.num_steps - 1, "one step has the prompt only"
    # The first steps may catch up with the prompt, and the last one has no room for a draft in the answer.
    assert max(steps, key=steps.__getitem__) in expected
    assert expected <= set(steps) <= expected | ({"catching_up", "no_proposal"} if credit else {"no_proposal"})
