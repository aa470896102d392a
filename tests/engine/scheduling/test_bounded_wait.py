"""No tenant's wait depends on another tenant's max_tokens, and no work is lost or counted twice."""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from adapters.tiers.device_pool import Residency
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.plan import StepLimits
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.fcfs import FirstCome
from engine.scheduling.request import QUANTUM, NewRequest, Request, SamplingParams, Status
from engine.scheduling.scheduler import Scheduler

STEP_S = 0.02
PREEMPT_AFTER_S = 0.25
# Length in tokens of the longest prompt in the test of the bound.
LONGEST_PROMPT = 60


@dataclass
class Pool:
    """Adapter pool in which the first `ensure` of an adapter copies two pages, and the second finds it ready."""

    placed: set[str] = field(default_factory=set)
    pins: Counter[str] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    reported: Counter[str] = field(default_factory=Counter)
    page_bytes: int = 100
    overdue: tuple[()] = ()

    def take_loaded_bytes(self) -> dict[str, int]:
        loaded, self.loaded = self.loaded, Counter()
        self.reported.update(loaded)
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

    def resident_among(self, digests: Set[str | None]) -> list[str]:
        return [digest for digest in digests if digest in self.placed]

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


@dataclass
class Wait:
    """A tenant's wait with nothing running. since: its first step. counter: the tenant's at that time.

    credit: cost that each other tenant may be served before the waiting one, because it was behind when the wait began,
    or when its own requests came. again: tokens that the other tenants' streams computed again after their admission.
    """

    tenant_id: str
    since: int
    counter: float
    credit: dict[str, float] = field(default_factory=dict)
    again: int = 0


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
        # By request: the tokens computed so far, and the tokens to compute again after the last admission.
        self.computed: Counter[str] = Counter()
        self.again: Counter[str] = Counter()
        self.num_computed = self.num_again = 0
        self.arrivals = 0
        self.weights: dict[str, float] = {}
        self.leaving: dict[Request, int] = {}
        self._ran: set[Request] = set()
        self.waits: dict[str, Wait] = {}
        self.ended_waits: list[tuple[Wait, float]] = []

    def ask(self, asked: Asked) -> Request:
        self.arrivals += 1
        prompt = [self.arrivals * 1000 + i for i in range(asked.prompt)]
        params = SamplingParams(max_tokens=asked.outputs, ignore_eos=True)
        new = NewRequest(
            f"{asked.tenant_id}-{self.arrivals}", prompt, params, asked.adapter, asked.tenant_id, asked.weight
        )
        request = Request(new, arrival=self.arrivals)
        self.weights[asked.tenant_id] = asked.weight
        self.scheduler.add(request)
        if asked.leaves is not None:
            self.leaving[request] = asked.leaves
        return request

    def step(self) -> dict[Request, int]:
        plan = self.scheduler.schedule()
        for request, num_tokens in plan.items():
            assert len(request.blocks) * 16 >= request.num_computed + num_tokens
            if request not in self._ran:
                self.again[request.request_id] = max(0, self.computed[request.request_id] - request.num_computed)
        self._leave(before_the_launch=True)
        for request, num_tokens in plan.items():
            if request.status is Status.RUNNING:
                self._count(request, request.num_computed, request.num_computed + num_tokens)
        ready = {r: 1 for r, n in plan.items() if r.num_computed + n == r.num_tokens}
        self.scheduler.advance(plan)
        for request in self.scheduler.commit(ready):
            self.tokens[request.request_id] += 1
        self.steps += 1
        self.now += STEP_S
        self._measure()
        self._leave(before_the_launch=False)
        return plan

    def _leave(self, *, before_the_launch: bool) -> None:
        """Abort the requests whose clients leave: every second one between the plan and the launch of a step."""
        for request, tokens in list(self.leaving.items()):
            if request.num_output_tokens >= tokens and request.arrival % 2 == before_the_launch:
                self.scheduler.abort(request.request_id)
                del self.leaving[request]

    def _count(self, request: Request, start: int, end: int) -> None:
        """Count executed work. A token costs its tenant something only the first time that it is computed."""
        known, prompt = self.computed[request.request_id], request.num_prompt_tokens
        first, pages = max(start, known), 2 if request.adapter_digest else 0
        self.num_computed += end - start
        self.num_again += min(end, first) - start
        for position in range(first, end):
            self.cost[request.tenant_id] += 1 if position < prompt - 1 else 2 + (position + 1) / 1024 + pages / 8
        self.computed[request.request_id] = max(known, end)

    def _measure(self) -> None:
        streams = set(self.scheduler.running)
        active, running = {r.tenant_id for r in self.scheduler.requests.values()}, {r.tenant_id for r in streams}
        for tenant_id in self.waits.keys() - (active - running):
            self.ended_waits.append((wait := self.waits.pop(tenant_id), self.lateness(wait)))
        for tenant_id in active - running:
            counter = self.policy.counter(tenant_id)
            wait = self.waits.setdefault(tenant_id, Wait(tenant_id, self.steps, counter))
            counted = streams if wait.since == self.steps else streams - self._ran
            wait.again += sum(self.again[r.request_id] for r in counted)
            for other in active - {tenant_id}:
                behind = max(0.0, wait.counter - self.policy.counter(other))
                wait.credit.setdefault(other, behind * self.weights[other])
        self._ran = streams

    def lateness(self, wait: Wait) -> float:
        """Return the number of steps by which a wait exceeds the documented bound: see docs/design/step-loop.md."""
        # The load of its adapter is charged while it waits.
        more = max(0.0, self.policy.counter(wait.tenant_id) - wait.counter) + getattr(self.policy, "_slack", 0.0)
        credits = sum(credit + more * self.weights[other] for other, credit in wait.credit.items())
        bound = PREEMPT_AFTER_S / STEP_S + credits + len(wait.credit) * (LONGEST_PROMPT + QUANTUM + 2) + 2 * wait.again
        return self.steps - wait.since - bound


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


def with_one_weight_each(asked: list[Asked]) -> list[Asked]:
    weights = {a.tenant_id: a.weight for a in asked}
    return sorted((replace(a, weight=weights[a.tenant_id]) for a in asked), key=lambda a: a.at)


def run(world: World, asked: list[Asked], most_steps: int) -> dict[Asked, Request]:
    """Run until all requests have ended, for at most `most_steps`. asked: by time."""
    made: dict[Asked, Request] = {}
    while (len(made) < len(asked) or world.scheduler.requests) and world.steps < most_steps:
        while len(made) < len(asked) and asked[len(made)].at <= world.steps:
            made[asked[len(made)]] = world.ask(asked[len(made)])
        world.step()
    return made


def charges(world: World) -> Counter[str]:
    """Record each tenant's charges, with its adapters' loads."""
    charged: Counter[str] = Counter()
    charge, charge_tenant = world.policy.charge, world.policy.charge_tenant

    def counted(request: Request, cost: float) -> None:
        charged[request.tenant_id] += cost
        charge(request, cost)

    def counted_load(tenant_id: str, cost: float) -> None:
        charged[tenant_id] += cost
        charge_tenant(tenant_id, cost)

    world.policy.charge = counted  # type: ignore[method-assign]
    world.policy.charge_tenant = counted_load  # type: ignore[method-assign]
    return charged


def check_work(world: World, made: dict[Asked, Request], charged: Counter[str]) -> None:
    """Check that all tokens arrived once, that each was paid for once, and that everything is free at the end."""
    assert not world.scheduler.requests
    for one, request in made.items():
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


@settings(max_examples=30, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(st.lists(requests, min_size=1, max_size=30, unique=True), st.integers(1, 6), st.sampled_from([40, 60, 200]))
def test_no_work_is_lost_or_counted_twice(asked: list[Asked], seats: int, blocks: int) -> None:
    world = World(seats, blocks)
    charged = charges(world)
    made = run(world, with_one_weight_each(asked), 20_000)
    check_work(world, made, charged)


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


waiting_requests = st.builds(
    Asked,
    at=st.integers(0, 60),
    tenant_id=st.sampled_from("abcd"),
    weight=st.sampled_from([1.0, 2.0, 4.0]),
    prompt=st.integers(1, LONGEST_PROMPT),
    outputs=st.one_of(st.integers(1, 20), st.integers(500, 4000)),
    adapter=st.sampled_from([None, None, "x", "y", "z"]),
    leaves=st.one_of(st.none(), st.none(), st.integers(0, 50)),
)


def late_waits(world: World, asked: list[Asked]) -> list[Wait]:
    """Run until every wait that begins within a bound of the last arrival is decided. Return the waits beyond theirs.

    The engine refuses a request that the cache could not hold.
    """
    asked = [replace(a, outputs=min(a.outputs, 16 * world.blocks - a.prompt)) for a in with_one_weight_each(asked)]
    num_tenants = len({a.tenant_id for a in asked})
    run(world, asked, int(60 + PREEMPT_AFTER_S / STEP_S) + num_tenants * (LONGEST_PROMPT + QUANTUM + 2))
    for wait in list(world.waits.values()):
        while world.waits.get(wait.tenant_id) is wait and world.lateness(wait) <= 0:
            world.step()
    late = [wait for wait, lateness in world.ended_waits if lateness > 0]
    return late + [wait for wait in world.waits.values() if world.lateness(wait) > 0]


@pytest.mark.usefixtures("takes_a_core")
@settings(max_examples=20, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(
    st.lists(waiting_requests, min_size=8, max_size=24, unique=True),
    st.integers(1, 4),
    st.sampled_from([40, 60, 200, 2000]),
    st.sampled_from([0.0, 0.0, 64.0]),
)
def test_a_wait_is_bounded_whatever_the_others_max_tokens(
    asked: list[Asked], seats: int, blocks: int, slack: float
) -> None:
    """The bound contains no output length. It is a few hundred steps, and the streams are longer than that."""
    assert not late_waits(World(seats, blocks, FairShare(slack, preempt_after=PREEMPT_AFTER_S)), asked)


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
