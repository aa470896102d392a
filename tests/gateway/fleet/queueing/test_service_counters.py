"""Counters of one process, against their slow twin."""

import random

import pytest

from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.shared_service import interval


class Slow(ServiceCounters):
    def _least(self) -> float:
        return min((self.received(tenant) for tenant in self._requests), default=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_counters_are_those_of_a_pass_over_all_tenants(seed: int):
    chance = random.Random(seed)
    fast, slow = ServiceCounters(), Slow()
    present: list[str] = []
    for _ in range(2000):
        act, tenant = chance.random(), f"tenant-{chance.randrange(40)}"
        if act < 0.4 or not present:
            weight = chance.choice([1.0, 2.0])
            for counters in (fast, slow):
                counters.enter(tenant, weight)
            present.append(tenant)
        elif act < 0.75:
            tenant = present.pop(chance.randrange(len(present)))
            for counters in (fast, slow):
                counters.leave(tenant)
        elif act < 0.97:
            tenant, cost = chance.choice(present), chance.uniform(0.0, 100.0)
            for counters in (fast, slow):
                counters.add_service(tenant, cost)
                counters.expect(tenant, -cost if act < 0.86 else cost)
        elif act < 0.98:
            for counters in (fast, slow):
                counters.exchange_failed()
        else:
            # Service elsewhere, or a counter that Redis has lost.
            changes = fast.changes()
            assert changes == slow.changes()
            results = [(max(0.0, each.service + chance.uniform(-50.0, 50.0)), 1) for each in changes]
            for counters in (fast, slow):
                counters.exchanged(changes, 10.0, results)
        assert [fast.counter(f"tenant-{i}") for i in range(40)] == [slow.counter(f"tenant-{i}") for i in range(40)]
        assert len(fast._lower) <= 2 * 40 + 64 + 1


def test_a_process_with_many_active_tenants_exchanges_less_often():
    counters = ServiceCounters()
    for number in range(1000):
        counters.enter(f"tenant-{number}", 1.0)
    assert interval(counters.number) == 1.0
    assert interval(0) == interval(250) == 0.25
    # It still renews its presence before it counts as dead.
    assert interval(10**6) == 2.0
