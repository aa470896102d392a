"""Order of waiting requests, against a slow twin that looks at every request, and the ageing of priorities."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.waiting import CHECKS_PRIORITY, Waiting
from wire.deadlines import PRIORITY_S


@dataclass(eq=False)
class Waiter:
    tenant_id: str
    priority: int
    deadline: float
    arrival_number: int
    arrived_at: float


class Twin:
    """The same order, found by a pass over all requests. waited: by priority, without the times when none waits."""

    def __init__(self, counters: ServiceCounters) -> None:
        self.counters = counters
        self.all: list[Waiter] = []
        self.waited: Counter[int] = Counter()

    def pass_time(self, seconds: int) -> None:
        self.waited.update(dict.fromkeys({each.priority for each in self.all}, seconds))

    def remove(self, waiter: Waiter, admitted: bool) -> None:
        self.all.remove(waiter)
        if admitted:
            self.waited[waiter.priority] = 0

    def order(self, line: list[Waiter]) -> tuple[float, float, int]:
        priority = line[0].priority
        aged = self.waited[priority] // PRIORITY_S if priority != CHECKS_PRIORITY else 0
        return priority - aged, self.counters.counter(line[0].tenant_id), min(each.arrival_number for each in line)

    def lines(self, tenants: set[str]) -> list[list[Waiter]]:
        found: dict[Any, list[Waiter]] = {}
        for each in self.all:
            if each.tenant_id in tenants:
                found.setdefault((each.tenant_id, each.priority), []).append(each)
        return list(found.values())

    def first(self, tenants: set[str]) -> Waiter | None:
        line = min(self.lines(tenants), key=self.order, default=None)
        return None if line is None else min(line, key=lambda each: (each.deadline, each.arrival_number))

    def last(self) -> Waiter:
        return max(max(self.lines(set(TENANTS)), key=self.order), key=lambda each: (each.deadline, each.arrival_number))


TENANTS = ("acme", "globex", "initech")
tenants = st.sampled_from(TENANTS)
STEPS = st.one_of(
    st.tuples(st.just("add"), tenants, st.sampled_from([0, 1, 5, 9, CHECKS_PRIORITY]), st.integers(0, 3)),
    st.tuples(st.just("charge"), tenants, st.integers(-2, 4)),
    st.tuples(st.just("exchange"), st.lists(st.integers(0, 5), min_size=3, max_size=3)),
    st.tuples(st.just("pass"), st.integers(0, 25)),
    st.tuples(st.just("admit"), st.sets(tenants)),
    st.tuples(st.just("refuse")),
    st.tuples(st.just("leave"), st.integers(0, 20)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_the_order_is_that_of_the_slow_twin(steps: list[Any]):
    now, counters = 0.0, ServiceCounters()
    waiting: Waiting[Waiter] = Waiting(counters.counter, lambda: now)
    counters.watch(waiting.reorder)
    twin = Twin(counters)
    for tenant in TENANTS:
        counters.enter(tenant, 1.0)
    for number, step in enumerate(steps):
        match step:
            case "add", tenant, priority, due:
                twin.all.append(Waiter(tenant, priority, float(due), number, now))
                waiting.add(twin.all[-1])
            case "charge", tenant, cost:
                counters.add_service(tenant, cost)
            case "exchange", values:
                sent = counters.changes()
                counters.exchanged(sent, 3.0, [(float(value), 1) for value in values])
            case "pass", seconds:
                now += seconds
                twin.pass_time(seconds)
            case "admit", allowed:
                first = twin.first(allowed)
                assert waiting.first(lambda waiter, allowed=allowed: waiter.tenant_id in allowed) is first
                if first is not None:
                    twin.remove(first, True)
                    waiting.remove(first, admitted=True)
            case ("refuse",) if twin.all:
                last = twin.last()
                assert waiting.last() is last
                twin.remove(last, False)
                waiting.remove(last)
            case "leave", index if index < len(twin.all):
                leaving = twin.all[index]
                twin.remove(leaving, False)
                waiting.remove(leaving)
                assert leaving not in waiting
        assert (len(waiting), set(waiting)) == (len(twin.all), set(twin.all))
        assert waiting.first() is twin.first(set(TENANTS))
        assert all(each in waiting for each in twin.all)


class Crowd:
    """Queue of a single place with tenants of priority 0 always waiting. admitted: priorities, one each second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counters = ServiceCounters()
        self.waiting: Waiting[Waiter] = Waiting(self.counters.counter, lambda: self.now)
        self.counters.watch(self.waiting.reorder)
        self.arrivals = 0
        self.admitted: list[int] = []

    def come(self, tenant: str, priority: int) -> Waiter:
        self.arrivals += 1
        if tenant not in self.counters._requests:
            self.counters.enter(tenant, 1.0)
        waiter = Waiter(tenant, priority, 0.0, self.arrivals, self.now)
        self.waiting.add(waiter)
        return waiter

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.come("best", 0)
            first = self.waiting.first()
            assert first is not None
            self.waiting.remove(first, admitted=True)
            self.counters.add_service(first.tenant_id, 1.0)
            self.admitted.append(first.priority)
            self.now += 1.0


@pytest.mark.parametrize("priority", [1, 5, 9])
def test_no_priority_starves_and_none_gains_more_than_its_turns(priority: int):
    crowd = Crowd()
    for _ in range(100):
        crowd.come("patient", priority)
    crowd.run(2000)
    turns = [at for at, each in enumerate(crowd.admitted) if each == priority]
    waits = [later - earlier for earlier, later in zip([0, *turns], turns, strict=False)]
    assert max(waits) <= PRIORITY_S * (priority + 1) + 1
    assert min(waits) >= PRIORITY_S * priority


def test_a_client_that_times_out_and_tries_again_gets_its_turn():
    crowd = Crowd()
    for _ in range(8):
        tried = crowd.come("patient", 9)
        crowd.run(25)
        if 9 in crowd.admitted:
            break
        crowd.waiting.remove(tried)
        # The clock stands while none of the priority waits.
        crowd.run(25)
    assert len(crowd.admitted) == 4 * 25 + 3 * 25
    assert crowd.admitted.count(9) == 1


def test_the_gateways_own_checks_never_age():
    crowd = Crowd()
    crowd.come("checks", CHECKS_PRIORITY)
    crowd.run(500)
    assert set(crowd.admitted) == {0}


def test_a_flood_of_old_requests_passes_no_less_served_tenant():
    """Two tenants of one priority take turns by their service, however long the requests of one have waited."""
    crowd = Crowd()
    for _ in range(50):
        crowd.come("flood", 5)
    crowd.counters.add_service("flood", 1.0)
    crowd.now += 1000
    crowd.come("other", 6)
    quiet = crowd.come("quiet", 5)
    crowd.counters.add_service("flood", 1.0)
    assert crowd.waiting.first() is quiet
