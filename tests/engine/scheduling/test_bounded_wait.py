"""No tenant's wait depends on another tenant's max_tokens, and no work is lost or counted twice."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.pacing import Pacer
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.fcfs import FirstCome
from engine.scheduling.request import Request
from tests.engine.scheduling.world import (
    ORDERING,
    PREEMPT_AFTER_S,
    SAMPLE,
    SEARCH,
    Asked,
    Wait,
    World,
    requests_of,
    run,
    with_one_weight_each,
)

# Steps in which the test of the bound lets requests arrive, and steps after that in which waits may begin.
ARRIVALS, WATCHED = 60, 500


@pytest.mark.parametrize("weight", [0.25, 1.0, 4.0])
def test_a_late_tenant_is_served_at_once(weight: float) -> None:
    """A tenant holds every seat for 2,000 tokens; another's first token does not wait for `preempt_after`."""
    world = World(seats=8, blocks=4096)
    for _ in range(20):
        world.ask(Asked(0, "first", 1.0, 20, 2000))
    for _ in range(40):
        world.step()
    late = world.ask(Asked(0, "late", weight, 20, 10))
    before = world.steps
    while not late.num_output_tokens:
        world.step()
    assert world.steps - before <= 2
    assert world.scheduler.num_preemptions == 1
    assert world.scheduler.preempted.largest(9) == (("first", "late", 1),)


def test_first_come_first_served_makes_the_late_tenant_wait() -> None:
    world = World(seats=8, blocks=4096, policy=FirstCome())
    for _ in range(8):
        world.ask(Asked(0, "first", 1.0, 20, 500))
    for _ in range(40):
        world.step()
    late = world.ask(Asked(0, "late", 1.0, 20, 10))
    while not late.num_output_tokens:
        world.step()
    assert world.steps > 490


def test_seats_of_two_tenants_end_up_even_and_stay_so() -> None:
    world = World(seats=8, blocks=4096)
    for _ in range(20):
        world.ask(Asked(0, "first", 1.0, 20, 2000))
    for _ in range(40):
        world.step()
    for _ in range(20):
        world.ask(Asked(0, "late", 1.0, 20, 2000))
    for _ in range(600):
        world.step()
    assert Counter(r.tenant_id for r in world.scheduler.running) == {"first": 4, "late": 4}
    preempted = world.scheduler.num_preemptions
    for _ in range(600):
        world.step()
    assert world.scheduler.num_preemptions <= preempted + 1


def test_admission_leaves_blocks_for_the_growth_of_streams() -> None:
    """40 requests of 200 + 800 tokens in 400 blocks: twice the useful tokens were computed without room to grow."""
    for tenants in (1, 2):
        world, computed = World(seats=64, blocks=400), 0
        for i in range(40):
            world.ask(Asked(0, f"t{i % tenants}", 1.0, 200, 800))
        while world.scheduler.requests:
            computed += sum(world.step().values())
        assert computed < 1.1 * 40 * 1000


requests = st.builds(
    Asked,
    at=st.integers(0, 200),
    tenant_id=st.sampled_from("abcd"),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    prompt=st.integers(1, 200),
    outputs=st.integers(1, 400),
    adapter=st.sampled_from([None, None, "x", "y", "z"]),
    leaves=st.one_of(st.none(), st.integers(0, 50)),
    **ORDERING,
)


def charges(world: World) -> Counter[str]:
    """Record each tenant's charges, with its adapters' loads."""
    charged: Counter[str] = Counter()
    add_service, add_tenant_service = world.policy.add_service, world.policy.add_tenant_service

    def counted(request: Request, cost: float) -> None:
        charged[request.tenant_id] += cost
        add_service(request, cost)

    def counted_load(tenant_id: str, cost: float) -> None:
        charged[tenant_id] += cost
        add_tenant_service(tenant_id, cost)

    world.policy.add_service = counted  # type: ignore[method-assign]
    world.policy.add_tenant_service = counted_load  # type: ignore[method-assign]
    return charged


def check_work(world: World, made: list[tuple[Asked, Request]], charged: Counter[str]) -> None:
    """Check that all tokens arrived once, that each was paid for once, and that everything is free at the end."""
    assert not world.scheduler.requests
    for one, request in made:
        computed = world.computed[request.request_id]
        assert request.num_output_tokens == world.tokens[request.request_id]
        if one.leaves is None:
            assert (request.finish_reason, request.num_output_tokens) == ("length", one.outputs)
        if request.num_output_tokens:
            assert computed in (one.prompt + request.num_output_tokens - 1, one.prompt + request.num_output_tokens)
    assert world.num_computed == world.computed.total() + world.num_again
    for tenant_id, num_bytes in world.pool.reported.items():
        world.cost[tenant_id] += num_bytes / world.pool.page_bytes * 64
    assert +charged == pytest.approx(+world.cost)
    assert world.scheduler.cache.num_free == world.blocks
    assert sorted(world.scheduler._seats._free) == list(range(world.seats))
    assert not +world.pool.pins
    assert not world.scheduler.num_waiting


serves = given(
    st.lists(requests, min_size=1, max_size=30, unique=True), st.integers(1, 6), st.sampled_from([40, 60, 200])
)


def check_serving(asked: list[Asked], seats: int, blocks: int) -> None:
    world = World(seats, blocks)
    charged = charges(world)
    made = run(world, asked, 20_000)
    check_work(world, made, charged)


@settings(SAMPLE, max_examples=30)
@serves
def test_no_work_is_lost_or_counted_twice(asked: list[Asked], seats: int, blocks: int) -> None:
    check_serving(asked, seats, blocks)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(SEARCH, max_examples=600)
@serves
def test_no_work_is_lost_in_new_examples(asked: list[Asked], seats: int, blocks: int) -> None:
    check_serving(asked, seats, blocks)


def test_tokens_computed_again_after_preemptions_are_free_and_none_is_lost() -> None:
    """Tenants of different weights in 40 blocks: streams are preempted often and lose their blocks."""
    world = World(seats=6, blocks=40)
    charged = charges(world)
    asked = [
        Asked(i, "abcd"[i % 4], (0.5, 1.0, 4.0, 1.0)[i % 4], 7 * i + 1, 200 + i, None, 30 if i % 5 == 0 else None)
        for i in range(24)
    ]
    made = run(world, asked, 20_000)
    check_work(world, made, charged)
    assert world.scheduler.num_preemptions > 10
    assert world.num_again > 300


def late_waits(world: World, asked: list[Asked]) -> list[Wait]:
    """Run until every wait that begins in the first 560 steps is decided. Return the waits beyond their bounds.

    The engine refuses a request that the cache could not hold.
    """
    asked = [replace(a, outputs=min(a.outputs, 16 * world.blocks - a.prompt)) for a in asked]
    run(world, asked, ARRIVALS + WATCHED)
    for wait in list(world.waits.values()):
        while world.waits.get(wait.tenant_id) is wait and world.lateness(wait) <= 0:
            world.step()
    late = [wait for wait, lateness in world.ended_waits if lateness > 0]
    return late + [wait for wait in world.waits.values() if world.lateness(wait) > 0]


asked_lists = st.lists(requests_of("abcd", ARRIVALS), min_size=8, max_size=24, unique=True)
# Arrivals, seats, blocks, slack and the stretch of a pacer, or None without one. In half of the lists the weights of
# tenants change.
waits = given(
    st.one_of(asked_lists, asked_lists.map(with_one_weight_each)),
    st.integers(1, 4),
    st.sampled_from([40, 60, 200, 2000]),
    st.sampled_from([0.0, 256.0]),
    st.sampled_from([None, 1.8]),
)


def check_waits(asked: list[Asked], seats: int, blocks: int, slack: float, stretch: float | None) -> None:
    policy, pacer = FairShare(slack, preempt_after=PREEMPT_AFTER_S), None if stretch is None else Pacer(stretch)
    assert not late_waits(World(seats, blocks, policy, pacer), asked)


@pytest.mark.usefixtures("takes_a_core")
@settings(SAMPLE, max_examples=20)
@waits
def test_a_wait_is_bounded_whatever_the_others_max_tokens(
    asked: list[Asked], seats: int, blocks: int, slack: float, stretch: float | None
) -> None:
    """The bound contains no output length. It is a few hundred steps, and the streams are longer than that.

    Prompts are up to five times as long as a step.
    """
    check_waits(asked, seats, blocks, slack, stretch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(SEARCH, max_examples=400)
@waits
def test_a_wait_is_bounded_in_new_examples(
    asked: list[Asked], seats: int, blocks: int, slack: float, stretch: float | None
) -> None:
    check_waits(asked, seats, blocks, slack, stretch)


@pytest.mark.parametrize("blocks", [60, 2000])
@pytest.mark.parametrize("preempts", [True, False])
def test_without_preemption_for_fairness_the_bound_does_not_hold(blocks: int, preempts: bool) -> None:
    policy = FairShare(preempt_after=PREEMPT_AFTER_S)
    if not preempts:
        policy.preemptible = lambda *_, **__: []  # type: ignore[method-assign]
    # A request of a or b has all blocks or, with 2,000 blocks, four have all seats.
    asked = [Asked(i, "ab"[i % 2], 1.0, 20, 900 if blocks == 60 else 2000) for i in range(8)]
    asked.append(Asked(30, "c", 2.0, 20, 10))
    late = late_waits(World(4, blocks, policy), asked)
    assert bool(late) is not preempts
