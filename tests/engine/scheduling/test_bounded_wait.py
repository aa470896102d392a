"""No tenant's wait depends on another tenant's max_tokens, and no work is lost or counted twice."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from adapters.tiers.device_pool import Residency
from engine.scheduling.cost import step_cost
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.fcfs import FirstCome
from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler, StepLimits

STEP_S = 0.02
PREEMPT_AFTER_S = 0.25


@dataclass
class Pool:
    """Adapter pool in which the first `ensure` of an adapter copies two pages, and the second finds it ready."""

    placed: set[str] = field(default_factory=set)
    pins: Counter[str] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    page_bytes: int = 100
    overdue: tuple[()] = ()

    def take_loaded_bytes(self) -> dict[str, int]:
        loaded, self.loaded = self.loaded, Counter()
        return loaded

    def poll(self) -> None: ...

    def ensure(self, digest: str, tenant_id: str, weight: float) -> Residency:
        if digest in self.placed:
            return Residency.READY
        self.placed.add(digest)
        self.loaded[tenant_id] += 200
        return Residency.LOADING

    def is_resident(self, digest: str) -> bool:
        return digest in self.placed

    def num_pages_of(self, digest: str) -> int:
        return 2

    def pin(self, digest: str, tenant_id: str) -> int:
        self.pins[digest] += 1
        return 0

    def unpin(self, digest: str) -> None:
        self.pins[digest] -= 1

    def no_longer_wanted(self, digest: str) -> None: ...


@dataclass(frozen=True)
class Asked:
    """A request of the simulation. leaves: tokens after which its client leaves."""

    at: int
    tenant_id: str
    weight: float
    prompt: int
    outputs: int
    adapter: str | None = None
    leaves: int | None = None


class World:
    """A scheduler with a simulated clock. It counts tenants' costs, tokens and waits independently of the scheduler."""

    def __init__(self, seats: int = 4, blocks: int = 64, policy: FairShare | FirstCome | None = None) -> None:
        self.now, self.steps = 0.0, 0
        self.pool = Pool()
        self.policy = FairShare(preempt_after=PREEMPT_AFTER_S) if policy is None else policy
        self.blocks, self.seats = blocks, seats
        self.scheduler = Scheduler(
            KVCache(blocks, 16),
            self.pool,
            StepLimits(seats, 64),
            policy=self.policy,
            clock=lambda: self.now,  # type: ignore[arg-type]
        )
        self.cost: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.arrivals = 0
        # By tenant: the step since which it has waited with nothing running, and its longest such wait.
        self.idle_since: dict[str, int] = {}
        self.longest: Counter[str] = Counter()

    def ask(self, asked: Asked) -> Request:
        self.arrivals += 1
        prompt = [self.arrivals * 1000 + i for i in range(asked.prompt)]
        params = SamplingParams(max_tokens=asked.outputs, ignore_eos=True)
        new = NewRequest(
            f"{asked.tenant_id}-{self.arrivals}", prompt, params, asked.adapter, asked.tenant_id, asked.weight
        )
        request = Request(new, arrival=self.arrivals)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[Request, int]:
        plan = self.scheduler.schedule()
        for request, num_tokens in plan.items():
            assert len(request.blocks) * 16 >= request.num_computed + num_tokens
            self.cost[request.tenant_id] += step_cost(request, num_tokens)
        ready = {r: 1 for r, n in plan.items() if r.num_computed + n == r.num_tokens}
        self.scheduler.advance(plan)
        for request in self.scheduler.commit(ready):
            self.tokens[request.request_id] += 1
        self.steps += 1
        self.now += STEP_S
        self._measure()
        return plan

    def _measure(self) -> None:
        running = {r.tenant_id for r in self.scheduler.running}
        waiting = {r.tenant_id for r in self.scheduler.requests.values()} - running
        for tenant_id in waiting:
            since = self.idle_since.setdefault(tenant_id, self.steps)
            self.longest[tenant_id] = max(self.longest[tenant_id], self.steps - since)
        for tenant_id in self.idle_since.keys() - waiting:
            del self.idle_since[tenant_id]


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
)


def run(world: World, asked: list[Asked], most_steps: int) -> dict[Asked, Request]:
    """Run until all requests have ended, for at most `most_steps`."""
    left = sorted(asked, key=lambda a: a.at)
    made: dict[Asked, Request] = {}
    while (left or world.scheduler.requests) and world.steps < most_steps:
        while left and left[0].at <= world.steps:
            one = left.pop(0)
            made[one] = world.ask(one)
        world.step()
        for one, request in made.items():
            if one.leaves is not None and request.num_output_tokens >= one.leaves:
                world.scheduler.abort(request.request_id)
    return made


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.lists(requests, min_size=1, max_size=30, unique=True), st.integers(1, 6), st.sampled_from([40, 60, 200]))
def test_no_work_is_lost_or_counted_twice(asked: list[Asked], seats: int, blocks: int) -> None:
    """All tokens arrive once, counters equal the cost of the executed work, and everything is free at the end."""
    world = World(seats, blocks)
    weights = {a.tenant_id: a.weight for a in asked}
    asked = [Asked(a.at, a.tenant_id, weights[a.tenant_id], a.prompt, a.outputs, a.adapter, a.leaves) for a in asked]
    charged: Counter[str] = Counter()
    charge = world.policy.charge

    def counted(request: Request, cost: float) -> None:
        charged[request.tenant_id] += cost
        charge(request, cost)

    world.policy.charge = counted  # type: ignore[method-assign]
    made = run(world, asked, 20_000)
    assert not world.scheduler.requests
    for one, request in made.items():
        assert request.num_output_tokens == world.tokens[request.request_id]
        if one.leaves is None:
            assert (request.finish_reason, request.num_output_tokens) == ("length", one.outputs)
    assert +charged == pytest.approx(+world.cost)
    assert world.scheduler.cache.num_free == blocks
    assert sorted(world.scheduler._seats._free) == list(range(seats))
    assert not +world.pool.pins
    assert not world.scheduler.num_waiting


def bound(tenants: int, weights: list[float], prompt: int) -> float:
    """Return the documented bound of a wait in steps: see docs/design/step-loop.md."""
    spread = max(weights) / min(weights)
    # Each other tenant may be served a prompt, its computation again, and a quantum, in proportion to its weight.
    work = (tenants - 1) * (2 * prompt + 64) * (1 + spread)
    return PREEMPT_AFTER_S / STEP_S + work / 2


@pytest.mark.usefixtures("takes_a_core")
@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.lists(requests, min_size=5, max_size=40, unique=True), st.integers(1, 4), st.sampled_from([1, 4, 16]))
def test_a_wait_is_bounded_whatever_the_others_max_tokens(asked: list[Asked], seats: int, times: int) -> None:
    """The bound has the number of tenants, their weights and the prompts' sizes in it, and no output length."""
    weights = {a.tenant_id: a.weight for a in asked}
    asked = [Asked(a.at, a.tenant_id, weights[a.tenant_id], a.prompt, a.outputs * times, a.adapter) for a in asked]
    world = World(seats, blocks=2000)
    run(world, asked, 1500)
    longest = max(world.longest.values(), default=0)
    assert longest <= bound(len(weights), list(weights.values()), max(a.prompt for a in asked))
