"""Running requests are preempted for adapter pages only in favour of tenants that are behind theirs."""

from adapters.tiers import device_pool
from adapters.tiers.reservations import PAGE_WAIT_S
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.plan import StepLimits
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.fcfs import FirstCome
from engine.scheduling.policies.policy import Policy
from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from testing.device_pools import EveryAdapter, Worker, pool_of


class World:
    """A scheduler with room for two adapters, and a clock for its pool."""

    def __init__(self, monkeypatch, policy: Policy) -> None:
        self.now, self.arrivals = 1000.0, 0
        monkeypatch.setattr(device_pool.time, "monotonic", lambda: self.now)
        self.worker = Worker()
        self.policy = policy
        pool = pool_of(EveryAdapter(), 2, self.worker)
        self.scheduler = Scheduler(KVCache(400, 16), pool, StepLimits(8, 64), policy=policy)

    def ask(self, tenant_id: str, adapter: str = "") -> Request:
        self.arrivals += 1
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        new = NewRequest(tenant_id, [self.arrivals], params, adapter or f"adapter of {tenant_id}", tenant_id)
        request = Request(new, arrival_number=self.arrivals)
        self.scheduler.add(request)
        return request

    def step(self, seconds: float = 0.0) -> set[str]:
        """Run a step and return the tenants with running requests."""
        self.now += seconds
        self.worker.finish()
        plan = self.scheduler.schedule()
        ready = {r: 1 for r, n in plan.items() if r.num_computed + n == r.num_tokens}
        self.scheduler.advance(plan)
        self.scheduler.commit(ready)
        return {r.tenant_id for r in self.scheduler.running}

    def fill(self, adapter: str = "") -> None:
        """Run requests of the tenants low and middle, then let high and least reserve pages, in this order.

        adapter: the adapter of least, if it has none of its own.
        """
        for tenant_id in ("low", "middle"):
            self.ask(tenant_id)
        self.step()
        assert self.step() == {"low", "middle"}
        self.ask("high")
        self.step()
        self.ask("least", adapter)
        self.step()
        assert len(self.scheduler.adapters._reservations) == (1 if adapter else 2)
        for tenant_id, cost in (("low", 1000), ("middle", 2000), ("high", 4000)):
            self.policy.add_tenant_service(tenant_id, cost)


def test_nothing_is_preempted_for_a_tenant_that_is_ahead_of_the_others(monkeypatch):
    world = World(monkeypatch, FairShare())
    world.fill()
    world.scheduler.abort("least")
    for _ in range(5):
        assert world.step(PAGE_WAIT_S) == {"low", "middle"}
    assert world.scheduler.num_preemptions == 0


def test_the_least_served_tenant_gets_the_pages_that_are_preempted_for_it(monkeypatch):
    """The older reservation is that of the tenant furthest ahead."""
    world = World(monkeypatch, FairShare())
    world.fill()
    world.step(PAGE_WAIT_S)
    world.step()
    assert world.step() == {"low", "least"}, "of the tenants that are ahead, the one furthest ahead gives way"
    assert world.scheduler.num_preemptions == 1
    assert world.scheduler.preempted.largest(9) == (("middle", "least", 1),)


def test_a_reservation_acts_for_the_least_served_tenant_that_needs_the_adapter(monkeypatch):
    """The tenant furthest ahead has reserved the pages of the same adapter before."""
    world = World(monkeypatch, FairShare())
    world.fill("adapter of high")
    world.step(PAGE_WAIT_S)
    world.step()
    world.step()
    assert "least" in world.step()
    assert world.scheduler.preempted.largest(9) == (("middle", "least", 1),)


def test_a_reservation_does_not_act_for_a_tenant_whose_client_has_left(monkeypatch):
    """The tenant that still needs the adapter is ahead of all others, so nothing is preempted for it."""
    world = World(monkeypatch, FairShare())
    world.fill("adapter of high")
    assert world.step() == {"low", "middle"}, "the least served tenant asks first from here on"
    world.scheduler.abort("least")
    for _ in range(5):
        assert world.step(PAGE_WAIT_S) == {"low", "middle"}
    assert world.scheduler.num_preemptions == 0


def test_first_come_first_served_preempts_for_nobody(monkeypatch):
    world = World(monkeypatch, FirstCome())
    world.fill()
    for _ in range(5):
        assert world.step(PAGE_WAIT_S) == {"low", "middle"}
