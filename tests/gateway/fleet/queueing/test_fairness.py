"""Samples of the fairness history without servers: Jain's index, due parts, and bounds."""

from types import SimpleNamespace
from typing import Any

from gateway.fleet.queueing import fairness
from gateway.fleet.queueing.fairness import Fairness
from gateway.fleet.queueing.queue import TenantPlaces
from gateway.fleet.queueing.service_counters import ServiceCounters


class World:
    """Queues whose tenants the test sets, in the form {id: (weight, waiting requests)}."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[float, int]] = {}
        self.counters = ServiceCounters()
        self.fairness = Fairness(self, self.counters, list)  # type: ignore[arg-type]

    def tenants(self) -> dict[str, TenantPlaces]:
        return {
            each: TenantPlaces(f"name of {each}", weight, 0.0, 1, 1, waiting, 0.0)
            for each, (weight, waiting) in self.rows.items()
        }

    def serve(self, **costs: float) -> None:
        for tenant, cost in costs.items():
            self.counters.observe_service(tenant, cost)
        self.fairness.sample()


def test_the_index_compares_service_per_weight_of_those_that_wait():
    world = World()
    world.rows = {"a": (1.0, 3), "b": (2.0, 3), "idle": (5.0, 0)}
    for _ in range(3):
        world.serve(a=10, b=20, idle=1)
    assert world.fairness.jain() == 1.0
    for _ in range(fairness.NOW_SAMPLES):
        world.serve(a=10, b=0, idle=1)
    assert world.fairness.jain() == 0.5, "one of two gets everything"
    rows = {row.tenant: row for row in world.fairness.tenants()}
    assert rows["name of b"].is_behind
    assert not rows["name of idle"].is_behind, "it does not wait"


def test_a_due_part_counts_the_tenants_that_had_requests():
    world = World()
    world.rows = {"a": (1.0, 0)}
    world.serve(a=100)
    world.rows = {"a": (1.0, 0), "b": (3.0, 1)}
    world.serve(a=25, b=75)
    [a, b] = world.fairness.tenants()
    assert (a.now.share, a.now.due) == (0.625, 0.625)
    assert (b.now.share, b.now.due, b.now.waited) == (0.375, 0.375, 0.5)


def test_the_history_is_bounded():
    world = World()
    world.rows = {str(i): (1.0, 0) for i in range(fairness.MAX_TENANTS + 5)}
    for _ in range(fairness.POINT_SAMPLES * (fairness.MAX_POINTS + 2)):
        world.rows = {str(i): (1.0, 0) for i in range(3)}
        world.serve(**{"0": 1.0})
    assert len(world.fairness.points) == fairness.MAX_POINTS
    world.rows = {str(i): (1.0, 1) for i in range(fairness.MAX_TENANTS + 5)}
    world.serve(**{"0": 1.0})
    assert len(world.fairness.points[-1].service) == fairness.MAX_TENANTS
    for start in range(0, 5000, 500):
        world.rows = {str(i): (1.0, 1) for i in range(start, start + 500)}
        world.serve()
    tenant: Any = SimpleNamespace(id="0", name="zero", weight=1.0)
    for _ in range(5000):
        world.fairness.note_start(tenant, 0.5)
    assert len(world.fairness._known) <= fairness.MAX_KNOWN
    assert len(world.fairness._known["0"].waits) == fairness.TENANT_WAITS
    assert world.fairness.wait_percentiles() == (0.5, 0.5)


def test_engine_counts_keep_ids_of_unknown_tenants():
    state = SimpleNamespace(preempted=[SimpleNamespace(tenant="x", by="y", number=2)], tenants=[])
    world = World()
    world.fairness._engines = lambda: [SimpleNamespace(url="http://e", state=state)]  # type: ignore
    assert world.fairness.preemptions() == [("http://e", "x", "y", 2)]
