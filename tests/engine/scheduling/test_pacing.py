"""A step's prompt work beside running streams."""

from engine.scheduling.pacing import LEAST_CHUNK, Pacer


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


def test_it_knows_more_streams_than_it_has_seen_alone() -> None:
    """One stream was seen alone; then prompts came without a pause. 10 ms a step and 0.5 ms a row beyond the first."""
    pacer = Pacer(2.0)
    pacer.observe(0.010, 1, 0)
    for _ in range(100):
        budget = pacer.prompt_budget(16, 4096)
        pacer.observe(0.010 + (15 + budget) * 0.0005, 16, budget)
    assert abs(pacer.prompt_budget(16, 4096) - 35) <= 1  # 17.5 ms for 16 streams, as much again for prompts
