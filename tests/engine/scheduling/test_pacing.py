"""A step's prompt work beside running streams."""

from collections.abc import Callable

import pytest

from benchmarks.prefill_pacing import Machine, WithoutTrials, serve
from engine.scheduling.pacing import MIN_PROMPT_TOKENS, STEPS_UNTIL_ALONE, Pacer


def test_a_mixed_step_gets_the_prompt_tokens_that_stretch_it_as_asked() -> None:
    pacer = Pacer(1.5)
    for _ in range(50):
        pacer.observe(0.020, 8, 0)
        pacer.observe(0.020 + 64 * 0.0002, 8, 64)
    assert abs(pacer.paced_tokens(8, 4096) - 50) <= 1  # half of 20 ms at 0.2 ms a token
    assert pacer.paced_tokens(8, 30) == 30


def test_before_anything_is_known_and_on_a_slow_machine_prompts_still_come_forward() -> None:
    pacer = Pacer(1.5)
    assert pacer.paced_tokens(8, 4096) == MIN_PROMPT_TOKENS
    pacer.observe(0.001, 1, 0)
    pacer.observe(5.0, 0, 512)
    assert pacer.paced_tokens(1, 4096) == MIN_PROMPT_TOKENS


def test_it_follows_the_machine() -> None:
    pacer = Pacer(2.0)
    for seconds in (0.01, 0.04):
        for _ in range(100):
            pacer.observe(seconds, 8, 0)
            pacer.observe(seconds + 0.01, 8, 100)
    assert abs(pacer.paced_tokens(8, 4096) - 400) <= 8


def run(pacer: Pacer, steps: int, decodes: int, machine: Callable[[int, int], float]) -> list[int]:
    """Return the step budgets of endless prompts on a machine that takes `machine(decodes, prompt tokens)` seconds."""
    budgets = []
    for _ in range(steps):
        budgets.append(pacer.paced_tokens(decodes, 4096))
        pacer.observe(machine(decodes, budgets[-1]), decodes, budgets[-1])
    return budgets


def test_it_knows_more_streams_than_it_has_seen_alone() -> None:
    pacer = Pacer(2.0)
    pacer.observe(0.010, 1, 0)
    budgets = run(pacer, STEPS_UNTIL_ALONE, 16, lambda decodes, rows: 0.010 + (decodes - 1 + rows) * 0.0005)
    assert abs(budgets[-1] - 35) <= 1  # 17.5 ms for 16 streams, as much again for prompts


def test_prompts_without_end_leave_a_step_now_and_then_to_the_streams() -> None:
    """Endless prompts leave an occasional step to the streams; otherwise a slower machine would starve prompts."""
    pacer = Pacer(2.0)
    pacer.observe(0.010, 8, 0)
    slower = run(pacer, 300, 8, lambda _, rows: 0.040 + rows * 0.001)
    assert slower.count(0) == 300 // (STEPS_UNTIL_ALONE + 1)
    assert slower[-2] >= 25


def test_more_prompts_than_streams_get_longer_steps() -> None:
    pacer = Pacer(1.5)
    for _ in range(50):
        pacer.observe(0.020, 2, 0)
        pacer.observe(0.020 + 64 * 0.0002, 2, 64)
    alone = pacer.paced_tokens(2, 4096)
    assert pacer.paced_tokens(2, 4096, prompt_pressure=0.1) == alone
    assert abs(pacer.paced_tokens(2, 4096, prompt_pressure=2.0) - 32 * alone) <= 32
    assert pacer.paced_tokens(2, 4096, prompt_pressure=1e6) == 4096


def warm(machine: Machine) -> Pacer:
    pacer = Pacer(1.8)
    for _ in range(20):
        pacer.observe(machine.seconds(0), 8, 0)
    return pacer


@pytest.mark.parametrize("decode", [0.0012, 0.0045])
@pytest.mark.parametrize("fixed", [0.001, 0.002, 0.003, 0.0036, 0.004, 0.006, 0.010, 0.015])
def test_a_fixed_cost_of_mixed_steps_does_not_starve_a_long_prompt(decode: float, fixed: float) -> None:
    """A fixed cost starves neither the first long prompt nor one after hours. The least time is that of the rows."""
    machine = Machine(decode, fixed, 20e-6)
    pacer = warm(machine)
    for _ in range(3):
        seconds, _chunks = serve(pacer, machine, 4000)
        assert seconds < 0.8
        for _ in range(200):
            pacer.observe(machine.seconds(0), 8, 0)


@pytest.mark.parametrize(("decode", "each"), [(0.0012, 3e-6), (0.0045, 20e-6)])
@pytest.mark.parametrize("fixed", [0.0, 0.002, 0.003, 0.004, 0.006, 0.008, 0.010, 0.015])
def test_with_a_gpus_floor_a_long_prompts_first_token_comes_within_half_a_second(
    decode: float, each: float, fixed: float
) -> None:
    """Neither the first long prompt, before anything is known, nor a later one takes longer."""
    machine = Machine(decode, fixed, each)
    pacer = Pacer(1.8, 256)
    for _ in range(3):
        assert serve(pacer, machine, 4000)[0] < 0.5
        for _ in range(200):
            pacer.observe(machine.seconds(0), 8, 0)


@pytest.mark.parametrize("seed", range(10))
def test_noise_does_not_hide_a_fixed_cost(seed: int) -> None:
    machine = Machine(0.0045, 0.010, 20e-6, noise=0.1, seed=seed)
    pacer = warm(machine)
    assert sorted(serve(pacer, machine, 4000)[0] for _ in range(5))[2] < 1.0


@pytest.mark.parametrize("seed", range(10))
def test_without_a_fixed_cost_streams_keep_their_stretch(seed: int) -> None:
    """Noise and lost cores of two CPU cores do not count as a fixed cost, and trials become rare.

    Chunks equal those of a pacer without trials, except about one in a hundred.
    """

    def chunks(pacer: Pacer) -> list[int]:
        machine = Machine(0.020, 0.0, 0.0002, noise=0.1, seed=seed)
        for _ in range(20):
            pacer.observe(machine.seconds(0), 8, 0)
        return [chunk for _ in range(50) for chunk in serve(pacer, machine, 4000)[1] if chunk]

    expected, found = chunks(WithoutTrials(1.8)), chunks(Pacer(1.8))
    mean, found_mean = (sum(sizes) / len(sizes) for sizes in (expected, found))
    assert abs(found_mean - mean) < 0.03 * mean
    large, found_large = (sum(size > 1.5 * mean for size in sizes) / len(sizes) for sizes in (expected, found))
    assert found_large < large + 0.015


def test_rows_that_become_dearer_with_the_context_are_not_taken_for_a_fixed_cost() -> None:
    """Rows that cost more with each chunk are no fixed cost: chunks shrink while steps take equally long."""
    pacer, done = warm(Machine(0.020, 0.0, 0.0)), 0
    stretches = []
    while done < 8000:
        chunk = pacer.paced_tokens(8, 632, 1 / 8)
        took = 0.020 + chunk * 0.0001 * (1 + done / 400)
        pacer.observe(took, 8, chunk)
        stretches.append(took / 0.020)
        done += chunk
    assert sum(stretch > 2.2 for stretch in stretches) <= 0.03 * len(stretches)


def test_a_fixed_cost_that_is_gone_is_forgotten() -> None:
    slow, quick = Machine(0.0045, 0.010, 100e-6), Machine(0.0045, 0.0, 100e-6)
    pacer = warm(slow)
    serve(pacer, slow, 8000)
    serve(pacer, quick, 8000)
    chunks = serve(pacer, quick, 4000)[1]
    assert sum(chunks) / len(chunks) < 1.3 * 0.8 * 0.0045 / 100e-6


def test_steps_of_other_prompts_and_as_many_rows_are_taken():
    """Four prompt tokens beside twelve streams make the same number of rows as eight beside eight; both count."""
    pacer = Pacer(1.8)
    pacer.observe(0.01, 8, 0)
    pacer.observe(0.02, 12, 4)
    pacer.observe(0.02, 8, 8)
    assert pacer.paced_tokens(8, 512) >= 1


def test_decodes_that_have_ended_shorten_the_expected_decode_step_to_half_at_most() -> None:
    """The time of a row from prompt tokens may exceed that of a decode, so the correction is bounded."""
    pacer = Pacer(3.0)
    pacer.observe(0.010, 16, 0)
    pacer.observe(0.010 + 20 * 0.001, 16, 20)
    assert pacer.paced_tokens(1, 4096) == pytest.approx(10, abs=1)


def test_prompts_of_light_tenants_have_a_budget_of_their_own() -> None:
    """They get as many tokens as fit into the target, whatever the decodes; the pacer's own chunk stays."""
    pacer = Pacer(1.8)
    for _ in range(20):
        pacer.observe(0.020, 8, 0)
        pacer.observe(0.020 + 16 * 0.002, 8, 16)
    budget = pacer.budget(8, 500, 1.0, 0.25)
    assert budget.most == pytest.approx(125, abs=3)
    assert budget.paced == pacer.paced_tokens(8, 500) < 20
    assert budget.room(is_light=True, joins=False) > budget.room(is_light=False, joins=False)
    # Patience makes chunks larger, but not beyond the target.
    assert pacer.budget(8, 500, 3.0, 0.25).paced == budget.most - 8
    assert pacer.budget(8, 500, 3.0, None).paced == 500
    assert pacer.budget(0, 500, 1.0, 0.25).paced == budget.most


def test_prompts_of_light_tenants_in_every_step_leave_room_for_a_decode_step() -> None:
    """Without it, the step that measures decodes alone is never run, and the pacer gives other prompts nothing."""
    pacer = Pacer(1.8)
    pacer.observe(0.020, 8, 0)
    for steps in range(2 * STEPS_UNTIL_ALONE):
        budget = pacer.budget(8, 500, 1.0, 0.25)
        assert (budget.paced > 0) == (steps < STEPS_UNTIL_ALONE)
        assert budget.most > 0
        pacer.observe(0.020 + 16 * 0.002, 8, 16)
    assert pacer.budget(8, 500, 1.0, 0.25).is_spent
    pacer.observe(0.020, 8, 0)
    assert pacer.budget(8, 500, 1.0, 0.25).paced > 0
