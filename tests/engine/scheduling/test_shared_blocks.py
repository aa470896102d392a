"""Streams that share their prompt's blocks give way to other tenants like streams that share none."""

import pytest

from engine.scheduling.request import QUANTUM, NewRequest, Request, SamplingParams
from tests.engine.scheduling.world import PREEMPT_AFTER_S, STEP_S, Asked, World

BLOCKS, PROMPT_BLOCKS, OUTPUTS = 120, 70, 160


def ask_again(world: World, first: Request) -> None:
    """Add another choice of a request."""
    world.arrivals += 1
    new = NewRequest(
        f"choice-{world.arrivals}",
        first.token_ids[: first.num_prompt_tokens],
        SamplingParams(max_tokens=OUTPUTS, ignore_eos=True),
        tenant_id=first.tenant_id,
    )
    world.scheduler.add(Request(new, arrival_number=world.arrivals))


@pytest.mark.parametrize("choices", [1, 2, 4])
def test_choices_of_one_prompt_give_way_together(choices: int) -> None:
    """A prompt's blocks become free only once all of its choices have left, so none of them frees many alone."""
    world = World(seats=8, blocks=BLOCKS)
    first = world.ask(Asked(0, "first", 1.0, 16 * PROMPT_BLOCKS, OUTPUTS))
    while not first.num_output_tokens:
        world.step()
    for _ in range(choices - 1):
        ask_again(world, first)
    for _ in range(QUANTUM):
        world.step()
    assert len(world.scheduler.running) == choices
    late = world.ask(Asked(0, "late", 1.0, 16 * 60, 10))
    before = world.steps
    while late.seat < 0:
        world.step()
    assert world.steps - before <= PREEMPT_AFTER_S / STEP_S + 2
    assert world.scheduler.preempted.largest(9) == (("first", "late", choices),)
