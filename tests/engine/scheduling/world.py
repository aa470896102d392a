"""A scheduler in simulated time, which counts tenants' costs, tokens and waits independently of it."""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hypothesis import Phase, settings
from hypothesis import strategies as st

from adapters.tiers.device_pool import Residency
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.pacing import Pacer
from engine.scheduling.plan import Plan, StepLimits
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.fcfs import FirstCome
from engine.scheduling.request import QUANTUM, NewRequest, Request, SamplingParams, Status
from engine.scheduling.scheduler import Scheduler

# Seconds of a step; with a pacer, of a step without rows.
STEP_S = 0.02
# Seconds of a row with a pacer: four streams take long enough to be left out of a step.
ROW_S = 0.006
PREEMPT_AFTER_S = 0.25
# Tokens that a step computes at most.
STEP_TOKENS = 64
# Share of steps in which a pacer lets every prompt take part at least: beside light tenants' prompts without end, 16
# paced steps, 16 for the light tenants' prompts only, and one for decodes only.
PACED_SHARE = 16 / 33


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

    def leave(self, digest: str, tenant_id: str) -> None: ...
    def no_longer_wanted(self, digest: str) -> None: ...


@dataclass(frozen=True)
class Asked:
    """A request of the simulation. leaves: tokens after which its client leaves. age: seconds since its arrival at the
    gateway when it comes. limit: its max_tokens if its model ends the answer after `outputs`; None: they are its limit.
    """

    at: int
    tenant_id: str
    weight: float
    prompt: int
    outputs: int
    adapter: str | None = None
    leaves: int | None = None
    priority: int = 0
    target: float | None = None
    age: float = 0.0
    limit: int | None = None


# A simulation's class of requests, with a tenant and a weight.
AnyAsked = TypeVar("AnyAsked", bound=Any)
# Values that order one tenant's requests.
ORDERING = {
    "priority": st.sampled_from([0, 0, -1, 2]),
    "target": st.sampled_from([None, None, 0.1, 5.0]),
    "age": st.sampled_from([0.0, 0.0, 3.0, 30.0]),
}
# Settings of the properties in every run of the tests, and in the slow ones, which find new examples each time.
SAMPLE = settings(deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
SEARCH = settings(deadline=None, database=None, print_blob=True, phases=(Phase.generate, Phase.shrink))


def requests_of(tenants: str, last: int) -> st.SearchStrategy[Asked]:
    """Return requests, short and long, that come up to step `last`. tenants: their tenants, a letter each."""
    return st.builds(
        Asked,
        at=st.integers(0, last),
        tenant_id=st.sampled_from(tenants),
        weight=st.sampled_from([1.0, 2.0, 4.0]),
        prompt=st.one_of(st.integers(1, 60), st.integers(1, 300)),
        outputs=st.one_of(st.integers(1, 20), st.integers(500, 4000)),
        adapter=st.sampled_from([None, None, "x", "y", "z"]),
        leaves=st.one_of(st.none(), st.none(), st.integers(0, 50)),
        **ORDERING,
    )


@dataclass
class Wait:
    """A tenant's wait with nothing running. since: its first step. counter: the tenant's at that time.

    lead: by other tenant, service per weight by which it was behind when the wait began, or when its own requests came:
    it may be served that much before the waiting one. again: tokens that the other tenants' streams computed again
    after their admission.
    """

    tenant_id: str
    since: int
    counter: float
    lead: dict[str, float] = field(default_factory=dict)
    again: int = 0


class World:
    """A scheduler with a simulated clock. It counts tenants' costs, tokens and waits independently of the scheduler."""

    def __init__(
        self,
        seats: int = 4,
        blocks: int = 64,
        policy: FairShare | FirstCome | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.now, self.steps = 0.0, 0
        self.pool = Pool()
        self.policy = FairShare(preempt_after=PREEMPT_AFTER_S) if policy is None else policy
        self.pacer, self.blocks, self.seats = pacer, blocks, seats
        self.scheduler = Scheduler(
            KVCache(blocks, 16),
            self.pool,
            StepLimits(seats, STEP_TOKENS),
            policy=self.policy,
            pacer=pacer,
            clock=lambda: self.now,  # type: ignore[arg-type]
        )
        self.cost: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        # By request: the tokens computed so far, and the tokens to compute again after the last admission.
        self.computed: Counter[str] = Counter()
        self.again: Counter[str] = Counter()
        self.num_computed = self.num_again = 0
        self.arrivals = 0
        # The greatest and the least weight of each tenant's requests: an operator may change it while they run.
        self.heaviest: dict[str, float] = {}
        self.lightest: dict[str, float] = {}
        # By tenant: tokens of its longest prompt.
        self.longest: Counter[str] = Counter()
        self.leaving: dict[Request, int] = {}
        # By request without a first step: the time that orders it among its tenant's.
        self.due: dict[Request, float] = {}
        self._ran: set[Request] = set()
        self.waits: dict[str, Wait] = {}
        self.ended_waits: list[tuple[Wait, float]] = []

    def ask(self, asked: Asked) -> Request:
        self.arrivals += 1
        prompt = [self.arrivals * 1000 + i for i in range(asked.prompt)]
        params = SamplingParams(max_tokens=asked.outputs, ignore_eos=True)
        if asked.limit is not None:
            params = SamplingParams(max_tokens=asked.limit, min_tokens=asked.outputs)
        new = NewRequest(
            f"{asked.tenant_id}-{self.arrivals}",
            prompt,
            params,
            asked.adapter,
            asked.tenant_id,
            asked.weight,
            asked.priority,
            asked.target,
            arrived_at=self.now - asked.age,
        )
        # Every sampled token is 1; it ends an answer from its `min_tokens` on.
        stop_ids = frozenset[int]() if asked.limit is None else frozenset({1})
        request, tenant_id = Request(new, arrival_number=self.arrivals, stop_ids=stop_ids), asked.tenant_id
        self.heaviest[tenant_id] = max(asked.weight, self.heaviest.get(tenant_id, asked.weight))
        self.lightest[tenant_id] = min(asked.weight, self.lightest.get(tenant_id, asked.weight))
        self.longest[tenant_id] = max(self.longest[tenant_id], asked.prompt)
        target = 10.0 if asked.target is None else asked.target
        self.due[request] = self.now - asked.age + target + 10 * asked.priority
        self.scheduler.add(request)
        if asked.leaves is not None:
            self.leaving[request] = asked.leaves
        return request

    def step(self) -> dict[Request, int]:
        placed = {None, *self.pool.placed}
        plan = self.scheduler.schedule()
        self._check_order(plan, placed)
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
        self.now += self._seconds_of(plan)
        self._measure()
        self._leave(before_the_launch=False)
        return plan

    def _check_order(self, plan: Plan, placed: Set[str | None]) -> None:
        """Check that no request has its first step before one of its tenant that is due earlier and could begin.

        placed: the adapters that were on the device before the step, and None for the base model.
        """
        if isinstance(self.policy, FirstCome):
            return
        started = {request: self.due.pop(request) for request in plan if request in self.due}
        self.due = {request: due for request, due in self.due.items() if request.status is not Status.FINISHED}
        for request, due in started.items():
            for other, earlier in self.due.items():
                is_passed = other.tenant_id == request.tenant_id and earlier < due
                assert not (is_passed and other.adapter_digest in placed and other.status is Status.WAITING)

    def _seconds_of(self, plan: Plan) -> float:
        """Return the duration of a step, which the pacer observes."""
        if self.pacer is None:
            return STEP_S
        num_rows, num_decodes = sum(plan.values()), self.scheduler.num_decodes
        seconds = STEP_S + ROW_S * num_rows
        if plan and not self.scheduler.is_short:
            self.pacer.observe(seconds, num_decodes, num_rows - num_decodes)
        return seconds

    def _leave(self, *, before_the_launch: bool) -> None:
        """Abort the requests whose clients leave: every second one between the plan and the launch of a step."""
        for request, tokens in list(self.leaving.items()):
            if request.num_output_tokens >= tokens and request.arrival_number % 2 == before_the_launch:
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
                wait.lead.setdefault(other, max(0.0, wait.counter - self.policy.counter(other)))
        self._ran = streams

    def lateness(self, wait: Wait) -> float:
        """Return the number of steps by which a wait exceeds the documented bound: see docs/design/step-loop.md."""
        # The load of its adapter is charged while it waits.
        more = max(0.0, self.policy.counter(wait.tenant_id) - wait.counter) + self.slack
        credits = sum((lead + more) * self.heaviest[other] for other, lead in wait.lead.items())
        steps = credits + self.steps_to_give_way(wait.lead) + (1 + self.steps_per_token) * wait.again
        return self.steps - wait.since - PREEMPT_AFTER_S / STEP_S - steps / self.paced_share

    def steps_to_give_way(self, tenants: Iterable[str]) -> float:
        """Return the steps in which tenants that are ahead end a prompt and a quantum each, and give way."""
        return sum(self.longest[tenant_id] + self.steps_per_token * QUANTUM + 2 for tenant_id in tenants)

    @property
    def slack(self) -> float:
        return getattr(self.policy, "_slack", 0.0)

    @property
    def steps_per_token(self) -> int:
        """Return the steps in which a stream computes a token: with a pacer, it is left out of every second one."""
        return 1 if self.pacer is None else 2

    @property
    def paced_share(self) -> float:
        return 1.0 if self.pacer is None else PACED_SHARE


def with_one_weight_each(asked: list[AnyAsked]) -> list[AnyAsked]:
    """Return the requests with their tenants' last weights."""
    weights = {a.tenant_id: a.weight for a in asked}
    return [replace(a, weight=weights[a.tenant_id]) for a in asked]


def run(world: World, asked: list[Asked], most_steps: int) -> list[tuple[Asked, Request]]:
    """Run until all requests have ended, for at most `most_steps`."""
    asked, made = sorted(asked, key=lambda a: a.at), list[tuple[Asked, Request]]()
    while (len(made) < len(asked) or world.scheduler.requests) and world.steps < most_steps:
        while len(made) < len(asked) and asked[len(made)].at <= world.steps:
            one = asked[len(made)]
            made.append((one, world.ask(one)))
        world.step()
    return made
