"""Targets of the time to first token, from a request's arrival at the gateway: its order and the counts."""

import pytest

from engine.scheduling.request import NOT_FINITE, Request, Status
from tests.engine.scheduling.world import STEP_S, Asked, World

# Steps end within it, and requests that came 20 s before do not.
TARGET_S = 1.0


def counts(world: World) -> tuple[int, int, float | None]:
    """Return the engine's counts, met and missed, and the tenant's goodput."""
    targets, goodput = world.scheduler.targets, [state.goodput for state in world.scheduler.tenants(9)]
    return targets.num_met, targets.num_missed, goodput[0] if goodput else None


def ask(world: World, target: float | None = TARGET_S, **fields: float) -> Request:
    """Ask for an answer of one tenant, whose account outlives the request."""
    if not world.scheduler.requests:
        world.ask(Asked(0, "a", 1.0, 1, 100))
        world.step()
    return world.ask(Asked(0, "a", 1.0, 1, 3, None, None, 0, target, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("age", "expected"), [(0.0, (1, 0, 1.0)), (20.0, (0, 1, 0.0))])
def test_a_target_counts_from_the_arrival_at_the_gateway(age: float, expected: tuple[int, int, float]) -> None:
    """A request that waited 20 s at the gateway misses a target of 1 s, although the engine needs one step."""
    world = World()
    ask(world, age=age)
    for _ in range(5):
        world.step()
    assert counts(world) == expected


def test_a_request_that_waited_at_the_gateway_is_due_earlier() -> None:
    world = World(seats=1)
    first, late, early = ask(world), ask(world, None), ask(world, None, age=5.0)
    world.scheduler.abort("a-1")
    world.scheduler.abort(first.request_id)
    while not early.num_output_tokens:
        world.step()
    assert not late.num_output_tokens


def test_an_arrival_in_the_future_counts_as_one_now() -> None:
    world = World()
    request = ask(world, age=-100.0)
    assert request.arrived_at == world.now


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, (0, 0, None)), (2 * TARGET_S, (0, 1, 0.0))])
@pytest.mark.parametrize("seats", [1, 4])
def test_a_client_that_leaves_without_a_token_counts_only_once_its_target_is_over(
    seconds: float, expected: tuple[int, int, float | None], seats: int
) -> None:
    """The engine's counts and the tenant's goodput agree. seats: 1 if it leaves the queue, more if it leaves a step
    that computes its first token.
    """
    world = World(seats=seats)
    request = ask(world)
    if seats > 1:
        plan = world.scheduler.schedule()
        world.scheduler.advance(plan)
        assert request in plan
        request.num_pending = 1  # as the engine notes a token that the device samples
    world.now += seconds
    world.scheduler.abort(request.request_id)
    assert counts(world) == expected


def test_a_request_that_fails_without_a_token_missed_its_target() -> None:
    world = World()
    world.scheduler.fail(ask(world), "its adapter cannot be loaded")
    assert counts(world) == (0, 1, 0.0)


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, (0, 1, 0.0)), (1, (1, 0, 1.0))])
def test_a_request_whose_scores_are_not_finite_counts_once(num_tokens: int, expected: tuple[int, int, float]) -> None:
    """num_tokens: those before the failure."""
    world = World()
    request = ask(world)
    for _ in range(num_tokens):
        world.step()
    plan = world.scheduler.schedule()
    world.scheduler.advance(plan)
    world.scheduler.commit({r: NOT_FINITE if r is request else 1 for r in plan})
    assert (request.status, request.finish_reason) == (Status.FINISHED, "error")
    assert counts(world) == expected


def test_a_request_without_a_target_counts_nowhere() -> None:
    world = World()
    ask(world, None, age=20.0)
    world.step()
    assert world.now == pytest.approx(2 * STEP_S)
    assert counts(world) == (0, 0, None)
