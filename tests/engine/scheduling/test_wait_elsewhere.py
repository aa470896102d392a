"""Service at other engines delays only its own tenant: within the documented bounds, by 5 s with nothing running."""

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.scheduling.pacing import Pacer
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.tenants import ELSEWHERE_WAIT_S
from engine.scheduling.request import Request
from tests.engine.scheduling import test_bounded_wait, test_busy_wait
from tests.engine.scheduling.test_bounded_wait import late_waits
from tests.engine.scheduling.test_busy_wait import RequestWorld, late_requests, own_requests
from tests.engine.scheduling.world import PREEMPT_AFTER_S, STEP_S, Asked, Wait, World, requests_of

# Steps between two reports of a gateway: a quarter of a second.
REPORT_STEPS = 12


class Elsewhere(World):
    """A world in which gateways report service at other engines.

    rates: cost units a second, by tenant. charged: the tenants' cost units so far.
    """

    def __init__(self, seats: int, blocks: int, policy: FairShare, pacer: Pacer | None = None, **rates: float) -> None:
        super().__init__(seats, blocks, policy, pacer)
        self.rates = rates
        self.charged: Counter[str] = Counter()

    def step(self) -> dict[Request, int]:
        self.policy.forgive_elsewhere(self.now)  # as the engine before each step
        plan = super().step()
        if self.steps % REPORT_STEPS == 0:
            active = {request.tenant_id for request in self.scheduler.requests.values()}
            costs = {tenant_id: self.rates.get(tenant_id, 0.0) * REPORT_STEPS * STEP_S for tenant_id in active}
            assert self.policy.add_service_elsewhere(costs, self.now) == len(active)
            self.charged.update(costs)
        return plan


class IdleWorld(Elsewhere):
    """A world whose waits are bounded with 5 s in place of the service elsewhere that is forgiven then."""

    def lateness(self, wait: Wait) -> float:
        return super().lateness(wait) - ELSEWHERE_WAIT_S / STEP_S - 1


class BusyWorld(Elsewhere, RequestWorld):
    """A world whose waits are bounded with the service elsewhere that is charged meanwhile."""

    def _cost_of(self, tenant_id: str) -> float:
        return super()._cost_of(tenant_id) + self.charged[tenant_id]


examples = settings(deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
rates = st.sampled_from([100.0, 500.0, 3000.0])


@pytest.mark.parametrize("others", [4, 12])
@pytest.mark.parametrize("rate", [0.0, 3000.0])
@pytest.mark.parametrize("stops", [False, True])
def test_a_tenant_with_nothing_running_waits_5_s_for_its_service_elsewhere(
    others: int, rate: float, stops: bool
) -> None:
    """Four streams of another tenant have all seats for 4,000 tokens. others: its requests; 4: none of them waits.

    stops: the other engine dies after 1 s, so there are no further reports.
    """
    world = Elsewhere(4, 4096, FairShare(preempt_after=PREEMPT_AFTER_S), late=rate)
    for _ in range(others):
        world.ask(Asked(0, "first", 1.0, 20, 4000))
    for _ in range(4 * REPORT_STEPS):
        world.step()
    late, since = world.ask(Asked(0, "late", 1.0, 20, 10)), world.now
    world.policy.add_service_elsewhere({"late": rate}, world.now)
    while not late.num_output_tokens:
        if stops and world.now - since > 1.0:
            world.rates = {}
        world.step()
        assert world.now - since < 20.0
    most = ELSEWHERE_WAIT_S if rate else 0.0
    assert most - STEP_S <= world.now - since <= most + PREEMPT_AFTER_S + 3 * STEP_S


@pytest.mark.usefixtures("takes_a_core")
@settings(examples, max_examples=15)
@given(
    requests_of("a", test_bounded_wait.ARRIVALS),
    st.lists(requests_of("bcd", test_bounded_wait.ARRIVALS), min_size=8, max_size=24, unique=True),
    rates,
    st.integers(1, 4),
    st.sampled_from([40, 60, 2000]),
    st.sampled_from([0.0, 256.0]),
)
def test_a_wait_with_nothing_running_is_bounded_whatever_the_tenant_gets_elsewhere(
    own: Asked, others: list[Asked], rate: float, seats: int, blocks: int, slack: float
) -> None:
    policy = FairShare(slack, preempt_after=PREEMPT_AFTER_S)
    assert not late_waits(IdleWorld(seats, blocks, policy, a=rate), [own, *others])


@pytest.mark.usefixtures("takes_a_core")
@settings(examples, max_examples=8)
@given(
    st.lists(own_requests, min_size=3, max_size=8, unique=True),
    st.lists(requests_of("bcd", test_busy_wait.ARRIVALS), min_size=4, max_size=12, unique=True),
    rates,
    st.integers(1, 4),
    st.sampled_from([40, 2000]),
    st.sampled_from([0.0, 256.0]),
)
def test_any_requests_wait_is_bounded_by_its_tenants_own_service_elsewhere(
    own: list[Asked], others: list[Asked], rate: float, seats: int, blocks: int, slack: float
) -> None:
    policy = FairShare(slack, preempt_after=PREEMPT_AFTER_S)
    assert not late_requests(BusyWorld(seats, blocks, policy, a=rate), own + others)


@pytest.mark.parametrize("is_counted", [True, False])
def test_the_bound_of_a_tenant_with_a_stream_needs_the_term_of_its_service_elsewhere(is_counted: bool) -> None:
    """Tenant a has one stream here and 3,000 units a second elsewhere; its next request waits for a seat."""
    world = BusyWorld(2, 2000, FairShare(preempt_after=PREEMPT_AFTER_S), a=3000.0)
    if not is_counted:
        world.charged.update = lambda *_: None  # type: ignore[method-assign, assignment]
    asked = [Asked(0, "a", 1.0, 5, 20), Asked(1, "b", 1.0, 5, 3000), Asked(2, "a", 1.0, 5, 10)]
    asked += [Asked(3, "b", 1.0, 5, 3000) for _ in range(3)]
    late = late_requests(world, asked)
    assert bool(late) is not is_counted


def test_a_stream_here_does_not_end_the_wait_for_service_elsewhere() -> None:
    """A request of a tenant with a stream waits for the stream's end, and at most 5 s more for service elsewhere."""
    world = Elsewhere(2, 4096, FairShare(preempt_after=PREEMPT_AFTER_S), a=3000.0)
    stream = world.ask(Asked(0, "a", 1.0, 20, 200))
    for _ in range(REPORT_STEPS):
        world.step()
    for _ in range(4):
        world.ask(Asked(0, "b", 1.0, 20, 4000))
    world.step()
    waiting = world.ask(Asked(0, "a", 1.0, 21, 10))
    ended = None
    while not waiting.num_output_tokens:
        world.step()
        if ended is None and stream.finish_reason is not None:
            ended = world.now
        assert world.now < 60.0
    assert ended is not None
    assert world.now - ended <= ELSEWHERE_WAIT_S + PREEMPT_AFTER_S + 4 * STEP_S
