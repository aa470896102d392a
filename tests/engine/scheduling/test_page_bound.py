"""The wait for adapter pages of a tenant that is behind and has nothing running is bounded, whatever others run."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from adapters.tiers import device_pool
from adapters.tiers.adapter_reader import HostAdapter
from adapters.tiers.device_pool import AdapterPool
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.plan import StepLimits
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from testing.adapter_files import BASE
from testing.device_pools import EveryAdapter, Worker

# Pages for one reservation of each tenant: the largest adapters have four pages.
TENANTS, PAGES, STEP_S = "abc", 12, 0.1
RANKS = (8, 16, 24, 32, 32)
# The documented bound, with two copies of a step each, of another adapter and of the waiting one, and the step that
# begins the request. No load: the adapters are in host memory.
BOUND_S = 10.5 + 3 * STEP_S


class RankedAdapters(EveryAdapter):
    """Host tier that holds every adapter. The last digit of a digest is an index into `RANKS`."""

    def get(self, digest: str) -> HostAdapter:
        return EveryAdapter(RANKS[int(digest[-1])]).get(digest)


@dataclass(frozen=True)
class Asked:
    at: int
    tenant_id: str
    adapter: int
    outputs: int


@dataclass
class World:
    """A scheduler with free seats and blocks, and a pool with few pages, both on one clock."""

    now: float = 1000.0
    worker: Worker = field(default_factory=Worker)
    policy: FairShare = field(default_factory=FairShare)
    # By tenant: since when it has waited, behind all tenants with running requests and with nothing running itself.
    since: dict[str, float] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    arrivals: int = 0

    def __post_init__(self) -> None:
        options: Any = {"max_rank": 32, "dtype": torch.float32, "device": torch.device("cpu")}
        host: Any = RankedAdapters()
        page_bytes = AdapterPool(BASE, host, memory=1 << 22, **options).page_bytes
        self.pool = AdapterPool(BASE, host, memory=PAGES * page_bytes, **options)
        self.pool._copier.shutdown()
        self.pool._copier = self.worker  # type: ignore[assignment]
        self.scheduler = Scheduler(
            KVCache(20_000, 16), self.pool, StepLimits(64, 640), policy=self.policy, clock=lambda: self.now
        )

    def ask(self, asked: Asked, weight: float) -> None:
        self.arrivals += 1
        params = SamplingParams(max_tokens=asked.outputs, ignore_eos=True)
        digest = f"{asked.tenant_id}{asked.adapter}"
        new = NewRequest(f"r{self.arrivals}", [self.arrivals], params, digest, asked.tenant_id, weight)
        self.scheduler.add(Request(new, arrival=self.arrivals))

    def step(self) -> None:
        self.now += STEP_S
        self.worker.finish()
        plan = self.scheduler.schedule()
        ready = {r: 1 for r, n in plan.items() if r.num_computed + n == r.num_tokens}
        self.scheduler.advance(plan)
        self.scheduler.commit(ready)
        self._measure()

    def _measure(self) -> None:
        running = {r.tenant_id for r in self.scheduler.running}
        waiting = {r.tenant_id for r in self.scheduler.requests.values()} - running
        counter = self.policy.counter
        behind = {t for t in waiting if all(counter(other) > counter(t) for other in running)}
        for tenant_id in self.since.keys() - behind:
            self.waits.append(self.now - self.since.pop(tenant_id))
        for tenant_id in behind:
            self.since.setdefault(tenant_id, self.now)

    def longest_wait(self) -> float:
        return max([*self.waits, *(self.now - since for since in self.since.values())], default=0.0)


def run(asked: list[Asked], weights: tuple[float, ...], steps: int) -> World:
    world, left = World(), sorted(asked, key=lambda a: a.at)
    while world.arrivals < len(left) or (world.scheduler.requests and steps):
        while world.arrivals < len(left) and left[world.arrivals].at <= world.now * 10 - 10_000:
            one = left[world.arrivals]
            world.ask(one, weights[TENANTS.index(one.tenant_id)])
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
    monkeypatch.setattr(device_pool.time, "monotonic", lambda: newest[0].now)


requests = st.builds(
    Asked,
    at=st.integers(0, 150),
    tenant_id=st.sampled_from(TENANTS),
    adapter=st.integers(0, len(RANKS) - 1),
    outputs=st.one_of(st.integers(1, 20), st.integers(200, 2000)),
)


@pytest.mark.usefixtures("takes_a_core")
@settings(
    max_examples=15,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(requests, min_size=6, max_size=30),
    st.tuples(*[st.sampled_from([1.0, 2.0])] * len(TENANTS)),
)
def test_the_wait_for_pages_is_bounded(clock: None, asked: list[Asked], weights: tuple[float, ...]) -> None:
    """The requests that hold pages run for up to 200 s; each wait that begins in the first 15 s is decided."""
    assert run(asked, weights, int(BOUND_S / STEP_S) + 2).longest_wait() <= BOUND_S + 1e-6


@pytest.mark.parametrize("preempts", [True, False])
def test_without_preemption_for_pages_the_bound_does_not_hold(
    clock: None, monkeypatch: pytest.MonkeyPatch, preempts: bool
) -> None:
    if not preempts:
        monkeypatch.setattr(FairShare, "gives_way", lambda *_: False)
    asked = [Asked(i, "ab"[i % 2], 2 + i // 2, 2000) for i in range(6)]
    # The second preemption for the same tenant comes 10 s after its reservation.
    asked += [Asked(60, "c", 3, 10), Asked(85, "c", 4, 10)]
    world = run(asked, (1.0, 1.0, 1.0), int(BOUND_S / STEP_S) + 2)
    assert (world.longest_wait() > BOUND_S + 1e-6) is not preempts
    if preempts:
        assert world.longest_wait() > 10
