"""The wait for adapter pages, a seat and blocks of a tenant that is behind is bounded, whatever others run."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters import decaying_sums
from adapters.tiers import device_pool
from adapters.tiers.adapter_reader import HostAdapter
from adapters.tiers.device_pool import AdapterPool
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.plan import StepLimits
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.request import QUANTUM, NewRequest, Request, SamplingParams, Status
from engine.scheduling.scheduler import Scheduler
from testing.adapter_files import BASE
from testing.device_pools import EveryAdapter, Worker
from tests.engine.scheduling.world import ORDERING, SAMPLE, SEARCH, with_one_weight_each

# Pages for one reservation of each tenant: the largest adapters have four pages.
TENANTS, PAGES, STEP_S = "abc", 12, 0.1
# Blocks and seats that no request lacks.
AMPLE, AMPLE_SEATS = 20_000, 64
RANKS = (8, 16, 24, 32, 32)
# The documented bounds of a tenant with nothing running and of one with running requests, with two copies of a step
# each, of another adapter and of the waiting one, and the step that begins the request. No load: the adapters are in
# host memory.
BOUND_S, BUSY_BOUND_S = 10.5 + 3 * STEP_S, 20.5 + 3 * STEP_S
# The documented bound of the wait for a seat and blocks, without tokens that are computed again: prompts have a token,
# and a tenant that is behind all others has no lead.
BLOCKS_BOUND_S = 0.25 + (len(TENANTS) - 1) * (1 + QUANTUM + 2) * STEP_S


class RankedAdapters(EveryAdapter):
    """Host tier that holds every adapter. The last digit of a digest is an index into `RANKS`."""

    def get(self, digest: str) -> HostAdapter:
        return EveryAdapter(RANKS[int(digest[-1])]).get(digest)


@dataclass(frozen=True)
class Asked:
    """A request. leaves: steps after its arrival in which its client leaves; the default: never. age: seconds since its
    arrival at the gateway when it comes.
    """

    at: int
    tenant_id: str
    adapter: int
    outputs: int
    leaves: int | None = None
    weight: float = 1.0
    priority: int = 0
    target: float | None = None
    age: float = 0.0


@dataclass(frozen=True)
class Began:
    """The beginning of a wait. num_again: tokens that streams had computed again by then, without those of streams
    that ran then.
    """

    at: float
    num_again: int


@dataclass
class World:
    """A scheduler, and a pool with few pages, both on one clock."""

    blocks: int = AMPLE
    seats: int = AMPLE_SEATS
    now: float = 1000.0
    worker: Worker = field(default_factory=Worker)
    policy: FairShare = field(default_factory=FairShare)
    # Waits of tenants that are behind all other tenants with running requests. idle: those with nothing running, by
    # tenant; busy: those with running requests and a reservation, by its adapter, because they wait for one adapter
    # after the other. Busy waits count only if the tenant's own pages and all reservations fit.
    idle: dict[str, Began] = field(default_factory=dict)
    busy: dict[str, Began] = field(default_factory=dict)
    longest_idle: float = 0.0
    longest_busy: float = 0.0
    # The greatest time by which a wait exceeded its bound.
    late: float = 0.0
    arrivals: int = 0
    leaving: list[tuple[float, Request]] = field(default_factory=list)
    num_again: int = 0
    # By running request: the tokens that it had to compute again.
    again: dict[Request, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options: Any = {"max_rank": 32, "dtype": torch.float32, "device": torch.device("cpu")}
        host: Any = RankedAdapters()
        page_bytes = AdapterPool(BASE, host, memory=1 << 22, **options).page_bytes
        self.pool = AdapterPool(BASE, host, memory=PAGES * page_bytes, **options)
        self.pool._copier.shutdown()
        self.pool._copier = self.worker  # type: ignore[assignment]
        self.scheduler = Scheduler(
            KVCache(self.blocks, 16), self.pool, StepLimits(self.seats, 640), policy=self.policy, clock=lambda: self.now
        )

    def ask(self, asked: Asked) -> None:
        self.arrivals += 1
        params = SamplingParams(max_tokens=min(asked.outputs, 16 * self.blocks - 1), ignore_eos=True)
        digest = f"{asked.tenant_id}{asked.adapter}"
        new = NewRequest(
            f"r{self.arrivals}",
            [self.arrivals],
            params,
            digest,
            asked.tenant_id,
            asked.weight,
            asked.priority,
            asked.target,
            arrived_at=self.now - asked.age,
        )
        request = Request(new, arrival_number=self.arrivals)
        self.scheduler.add(request)
        if asked.leaves is not None:
            self.leaving.append((self.now + asked.leaves * STEP_S, request))

    def step(self) -> None:
        self.now += STEP_S
        self.worker.finish()
        self._leave()
        plan = self.scheduler.schedule()
        for request in self.scheduler.running:
            if request not in self.again:
                self.again[request] = max(0, request.num_paid - request.num_computed)
                self.num_again += self.again[request]
        ready = {r: 1 for r, n in plan.items() if r.num_computed + n == r.num_tokens}
        self.scheduler.advance(plan)
        self.scheduler.commit(ready)
        running = set(self.scheduler.running)
        self.again = {request: again for request, again in self.again.items() if request in running}
        self._measure()

    def _leave(self) -> None:
        """End the requests whose clients leave. A reservation ends with its last request, so its tenant's wait begins
        anew.
        """
        for at, request in self.leaving.copy():
            if at <= self.now:
                self.leaving.remove((at, request))
                if request.status is Status.WAITING:
                    self.idle.pop(request.tenant_id, None)
                    self.busy.pop(request.adapter_digest or "", None)
                if request.status is not Status.FINISHED:
                    self.scheduler.abort(request.request_id)

    def _measure(self) -> None:
        running = {r.tenant_id for r in self.scheduler.running}
        active = {r.tenant_id for r in self.scheduler.requests.values()}
        counter, began = self.policy.counter, Began(self.now, self.num_again - sum(self.again.values()))
        behind = {t for t in active if all(counter(other) > counter(t) for other in running - {t})}
        reservations = list(self.pool._reservations)
        pages: Counter[str] = Counter()
        for digest in {r.adapter_digest for r in self.scheduler.running if r.adapter_digest}:
            pages[digest[0]] += self.pool.num_pages_of(digest)
        reserved = sum(r.size.pages for r in reservations)
        busy = [r for r in reservations if r.tenant_id in behind & running]
        fit = {r.digest for r in busy if pages[r.tenant_id] + reserved <= PAGES}
        for waits, waiting in ((self.idle, behind - running), (self.busy, fit)):
            for key in waits.keys() - waiting:
                del waits[key]
            for key in waiting:
                waits.setdefault(key, began)
        for_blocks = 0.0 if (self.blocks, self.seats) == (AMPLE, AMPLE_SEATS) else BLOCKS_BOUND_S
        for one in self.idle.values():
            self.longest_idle = max(self.longest_idle, self.now - one.at)
            again = 2 * (self.num_again - one.num_again) * STEP_S
            self.late = max(self.late, self.now - one.at - BOUND_S - for_blocks - again)
        for one in self.busy.values():
            self.longest_busy = max(self.longest_busy, self.now - one.at)
            self.late = max(self.late, self.now - one.at - BUSY_BOUND_S)


def run(asked: list[Asked], seconds: float, blocks: int = AMPLE, seats: int = AMPLE_SEATS) -> World:
    """Run until all requests have come, and then until all have ended, for at most `seconds`."""
    world, left, steps = World(blocks, seats), sorted(asked, key=lambda a: a.at), round(seconds / STEP_S)
    while world.arrivals < len(left) or (world.scheduler.requests and steps):
        while world.arrivals < len(left) and left[world.arrivals].at <= world.now * 10 - 10_000:
            world.ask(left[world.arrivals])
        world.step()
        steps -= world.arrivals == len(left)
    return world


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools read the time of the newest world."""
    newest: list[World] = []
    make = World.__post_init__

    def noted(world: World) -> None:
        newest[:] = [world]
        make(world)

    monkeypatch.setattr(World, "__post_init__", noted)
    # Threads of earlier tests keep the real clock, and may still count a load before the first world.
    for module in (device_pool, decaying_sums):
        read = SimpleNamespace(monotonic=lambda: newest[0].now if newest else 0.0)
        monkeypatch.setattr(module, "time", read)


requests = st.builds(
    Asked,
    at=st.integers(0, 150),
    tenant_id=st.sampled_from(TENANTS),
    adapter=st.integers(0, len(RANKS) - 1),
    outputs=st.one_of(st.integers(1, 20), st.integers(200, 2000)),
    leaves=st.one_of(st.none(), st.none(), st.integers(0, 150)),
    weight=st.sampled_from([1.0, 2.0]),
    **ORDERING,
)
asked_lists = st.lists(requests, min_size=6, max_size=30)
# Arrivals, blocks and seats. In half of the lists the weights of tenants change.
waits = given(
    st.one_of(asked_lists, asked_lists.map(with_one_weight_each)),
    st.sampled_from([60, AMPLE]),
    st.sampled_from([2, AMPLE_SEATS]),
)
WITH_CLOCK = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.mark.usefixtures("takes_a_core")
@settings(SAMPLE, max_examples=15, **WITH_CLOCK)
@waits
def test_the_wait_for_pages_is_bounded(clock: None, asked: list[Asked], blocks: int, seats: int) -> None:
    """The requests that hold pages run for up to 200 s; each wait that begins in the first 15 s is decided.

    With 60 blocks or two seats the bound is the sum of those of pages and of seats and blocks.
    """
    assert run(asked, BUSY_BOUND_S + BLOCKS_BOUND_S, blocks, seats).late <= 1e-6


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(SEARCH, max_examples=300, **WITH_CLOCK)
@waits
def test_the_wait_for_pages_is_bounded_in_new_examples(
    clock: None, asked: list[Asked], blocks: int, seats: int
) -> None:
    assert run(asked, BUSY_BOUND_S + BLOCKS_BOUND_S, blocks, seats).late <= 1e-6


@pytest.mark.parametrize("preempts", [True, False])
def test_without_preemption_for_pages_the_bound_does_not_hold(
    clock: None, monkeypatch: pytest.MonkeyPatch, preempts: bool
) -> None:
    if not preempts:
        monkeypatch.setattr(FairShare, "gives_way", lambda *_: False)
    asked = [Asked(i, "ab"[i % 2], 2 + i // 2, 2000) for i in range(6)]
    # The second preemption for the same tenant comes 10 s after its reservation.
    asked += [Asked(60, "c", 3, 10), Asked(85, "c", 4, 10)]
    world = run(asked, BOUND_S + 2 * STEP_S)
    assert (world.late > 1e-6) is not preempts
    if preempts:
        assert world.longest_idle > 10


@pytest.mark.parametrize("preempts", [True, False])
def test_a_tenant_with_a_stream_waits_twenty_seconds_for_the_pages_of_its_next_adapter(
    clock: None, monkeypatch: pytest.MonkeyPatch, preempts: bool
) -> None:
    """Tenant a has two streams, b with twice the weight has one, so b is behind when it needs another adapter."""
    if not preempts:
        monkeypatch.setattr(FairShare, "gives_way", lambda *_: False)
    asked = [Asked(0, "a", 3, 2000), Asked(1, "b", 3, 2000, weight=2.0), Asked(2, "a", 4, 2000)]
    asked.append(Asked(60, "b", 4, 10, weight=2.0))
    world = run(asked, BUSY_BOUND_S + 2 * STEP_S)
    assert (world.late > 1e-6) is not preempts
    if preempts:
        assert world.longest_busy > 19


@pytest.mark.parametrize("preempts", [True, False])
def test_without_preemption_for_blocks_the_sum_of_both_bounds_does_not_hold(
    clock: None, monkeypatch: pytest.MonkeyPatch, preempts: bool
) -> None:
    """A stream of tenant a is expected to need all blocks. The load of its adapter puts c ahead for 10 s."""
    if not preempts:
        monkeypatch.setattr(FairShare, "preemptible", lambda *_, **__: [])
    asked = [Asked(0, "a", 3, 2000), Asked(60, "c", 3, 2000)]
    world = run(asked, 10 + BOUND_S + BLOCKS_BOUND_S + 1, blocks=60)
    assert (world.late > 1e-6) is not preempts
