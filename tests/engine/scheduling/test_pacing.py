"""A step's prompt work beside running streams."""

from collections.abc import Callable

from engine.scheduling.pacing import LEAST_CHUNK, STEPS_UNTIL_ALONE, Pacer


def test_a_mixed_step_gets_the_prompt_tokens_that_stretch_it_as_asked() -> None:
    pacer = Pacer(1.5)
    for _ in range(50):
        pacer.observe(0.020, 8, 0)
        pacer.observe(0.020 + 64 * 0.0002, 8, 64)
    assert abs(pacer.prompt_budget(8, 4096) - 50) <= 1  # half of 20 ms at 0.2 ms a token
    assert pacer.prompt_budget(8, 30) == 30


def test_before_anything_is_known_and_on_a_slow_machine_prompts_still_come_forward() -> None:
    pacer = Pacer(1.5)
    assert pacer.prompt_budget(8, 4096) == LEAST_CHUNK
    pacer.observe(0.001, 1, 0)
    pacer.observe(5.0, 0, 512)
    assert pacer.prompt_budget(1, 4096) == LEAST_CHUNK


def test_it_follows_the_machine() -> None:
    pacer = Pacer(2.0)
    for seconds in (0.01, 0.04):
        for _ in range(100):
            pacer.observe(seconds, 8, 0)
            pacer.observe(seconds + 0.01, 8, 100)
    assert abs(pacer.prompt_budget(8, 4096) - 400) <= 8


def run(pacer: Pacer, steps: int, decodes: int, machine: Callable[[int, int], float]) -> list[int]:
    """What prompts without end get, step by step, on a machine that takes `machine(decodes, prompt tokens)` seconds."""
    budgets = []
    for _ in range(steps):
        budgets.append(pacer.prompt_budget(decodes, 4096))
        pacer.observe(machine(decodes, budgets[-1]), decodes, budgets[-1])
    return budgets


def test_it_knows_more_streams_than_it_has_seen_alone() -> None:
    pacer = Pacer(2.0)
    pacer.observe(0.010, 1, 0)
    budgets = run(pacer, STEPS_UNTIL_ALONE, 16, lambda decodes, rows: 0.010 + (decodes - 1 + rows) * 0.0005)
    assert abs(budgets[-1] - 35) <= 1  # 17.5 ms for 16 streams, as much again for prompts


def test_prompts_without_end_leave_a_step_now_and_then_to_the_streams() -> None:
    """Else a machine that becomes slower would look as if prompts were the cause, and they would starve."""
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
    alone = pacer.prompt_budget(2, 4096)
    assert pacer.prompt_budget(2, 4096, patience=0.1) == alone
    assert abs(pacer.prompt_budget(2, 4096, patience=2.0) - 32 * alone) <= 32
    assert pacer.prompt_budget(2, 4096, patience=1e6) == 4096
