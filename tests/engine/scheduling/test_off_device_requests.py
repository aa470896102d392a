"""Requests whose adapters have no room delay no other tenant's claim to a seat."""

from dataclasses import dataclass

import pytest

from adapters.tiers.device_pool import Residency
from engine.scheduling.policies.fair_share import OFF_DEVICE_WITHOUT_SEAT
from tests.engine.scheduling.world import PREEMPT_AFTER_S, STEP_S, Asked, Pool, World


@dataclass
class FullPool(Pool):
    """Adapter pool without room for adapters whose names begin with "off"."""

    def ensure(self, digest: str, tenant_id: str, weight: float) -> Residency:
        return Residency.NO_ROOM if digest.startswith("off") else super().ensure(digest, tenant_id, weight)


@pytest.mark.parametrize("tenants", [1, 3])
def test_a_claim_to_a_seat_comes_before_streams_end(tenants: int) -> None:
    """Tenants that wait for many adapters are the least served, and their requests come first."""
    world = World(seats=4, blocks=4096)
    world.pool = world.scheduler.adapters = FullPool()  # type: ignore[assignment]
    world.scheduler._seats._adapters = world.pool  # type: ignore[assignment]
    for _ in range(4):
        world.ask(Asked(0, "first", 1.0, 20, 2000))
    for number in range(2 * OFF_DEVICE_WITHOUT_SEAT):
        world.ask(Asked(0, f"patient-{number % tenants}", 1.0, 20, 10, f"off-{number}"))
    for _ in range(40):
        world.step()
    late = world.ask(Asked(0, "late", 1.0, 20, 10))
    before = world.steps
    while late.seat < 0:
        world.step()
    assert world.steps - before <= PREEMPT_AFTER_S / STEP_S + 2
