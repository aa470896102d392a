"""The order of tenants."""

from collections import Counter
from collections.abc import Set
from heapq import heapify
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.cost import step_cost
from engine.scheduling.policies.fair_share import LOOKED_AT, FairShare, FairTurns
from engine.scheduling.policies.policy import Locality
from engine.scheduling.policies.tenants import BLOCKED_S, ELSEWHERE_WAIT_S, WINDOW_S, OnDeviceAmong
from engine.scheduling.request import NewRequest, Request, SamplingParams


def request(
    tenant_id: str, arrival: int = 0, *, weight: float = 1.0, priority: int = 0, adapter: str | None = None
) -> Request:
    new = NewRequest(
        f"{tenant_id}{arrival}", [1], SamplingParams(), adapter, tenant_id=tenant_id, weight=weight, priority=priority
    )
    return Request(new, arrival_number=arrival)


class Resident:
    """Locality by a set of adapters on the device."""

    def __init__(self, resident: set[str]) -> None:
        self.resident = resident

    def lacks_adapter(self, request: Request) -> bool:
        return request.adapter_digest is not None and request.adapter_digest not in self.resident

    def key(self, request: Request) -> tuple[bool, bool]:
        return self.lacks_adapter(request), False

    def on_device_among(self, adapters: Set[str | None]) -> list[str | None]:
        return [adapter for adapter in adapters if adapter is None or adapter in self.resident]


class SlowTurns(FairTurns):
    """Slow twin: it skips requests for adapters off the device one by one."""

    def _drop_off_device_tenants(self, locality: Locality) -> None:
        self._waiting = [*self._compared, *(self._waiting or ())]
        self._compared.clear()
        heapify(self._waiting)

    def _on_device_queue(self, tenant_id: str, locality: Locality) -> list[Request]:
        account = self._tenants.waiting.get(tenant_id)
        last = self._last_order_key.get(tenant_id, (-1, 0.0, 0))
        left = [r for r in account.queue if r.order_key > last] if account else []
        return [r for r in left if not locality.lacks_adapter(r)][LOOKED_AT - 1 :: -1]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_requests_come_in_the_order_of_the_slow_twin(data: st.DataObject) -> None:
    adapters = [None, *"abcdefgh"]
    entered = data.draw(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from(adapters)), min_size=1, max_size=60))
    locality = Resident(data.draw(st.sets(st.sampled_from("abcdefgh"))))
    charges = data.draw(st.lists(st.integers(0, 3), min_size=len(entered), max_size=len(entered)))
    slack, admitted = data.draw(st.sampled_from([0.0, 2.0])), data.draw(st.sets(st.integers(0, 60)))

    def order(turns_type: type[FairTurns]) -> list[str]:
        share, found = FairShare(slack), []
        for i, (tenant_id, adapter) in enumerate(entered):
            enter(share, request(tenant_id, i, adapter=adapter))
        for _ in range(2):  # steps
            turns = turns_type(share._tenants, [], locality, slack)
            while (r := turns.next(admits=True)) is not None:
                found.append(r.request_id)
                share.add_service(r, charges[r.arrival_number])
                if r.arrival_number in admitted:
                    share.remove(r)
        return found

    with mock.patch.multiple("engine.scheduling.policies.fair_share", OFF_DEVICE_IN_ALL=6, OFF_DEVICE_LOOKED_AT=3):
        assert order(FairTurns) == order(SlowTurns)


def serve(share: FairShare, n: int, cost: float = 10) -> list[str]:
    """Take the next request n times, charging each with `cost`."""
    order = []
    for i in range(n):
        if i % 16 == 0:  # a step
            turns = share.turns([], None)
        r = turns.next(admits=True)
        assert r is not None
        share.remove(r)
        share.add_service(r, cost)
        order.append(r.tenant_id)
    return order


def enter(share: FairShare, request: Request, now: float = 0.0) -> None:
    request.arrived_at = now
    share.enter(request, now)


def test_a_flood_by_one_tenant_does_not_delay_another() -> None:
    share = FairShare()
    for i in range(100):
        enter(share, request("flood", i))
    for i in range(3):
        enter(share, request("quiet", 100 + i))
    assert Counter(serve(share, 6)) == {"flood": 3, "quiet": 3}


@pytest.mark.parametrize("weight", [2.0, 4.0])
def test_service_follows_weight(weight: float) -> None:
    share = FairShare()
    for i in range(200):
        enter(share, request("heavy", i, weight=weight))
        enter(share, request("light", i))
    served = Counter(serve(share, 100))
    assert served["heavy"] / served["light"] == pytest.approx(weight, rel=0.1)


def test_idling_earns_no_credit() -> None:
    share = FairShare()
    idle = request("idle")
    enter(share, idle)
    serve(share, 1)
    for i in range(60):
        enter(share, request("busy", i))
    share.leave(idle)
    serve(share, 30)
    for i in range(60):
        enter(share, request("idle", 100 + i))
    assert Counter(serve(share, 20)) == {"busy": 10, "idle": 10}


def test_low_demand_earns_no_credit_beside_long_streams() -> None:
    """A short request between them would leave its counter as the last one of an admitted request."""
    share = FairShare()
    stream, short = request("busy"), request("sparse", 1)
    for each in (stream, short):
        enter(share, each)
        share.remove(each)
        share.add_service(each, 100)
    share.leave(short)
    share.add_service(stream, 10_000)
    for i in range(60):
        enter(share, request("sparse", 2 + i))
        enter(share, request("busy", 100 + i))
    assert Counter(serve(share, 20)) == {"busy": 10, "sparse": 10}


def beside_a_blocked_request() -> tuple[FairShare, OnDeviceAmong]:
    """Return a queue in which "patient" waits for an adapter since 0 s, and "busy" has a stream with much service."""
    share, on_device_among = FairShare(), Resident(set()).on_device_among
    share.enter(request("patient", adapter="loading"), 0.0, on_device_among)
    stream = request("busy", 1)
    share.enter(stream, 0.0, on_device_among)
    share.remove(stream)
    share.add_service(stream, 10_000)
    return share, on_device_among


@pytest.mark.parametrize("seconds", [BLOCKED_S, BLOCKED_S + 1])
def test_a_request_that_waits_long_for_its_adapter_earns_no_credit_for_its_tenants_others(seconds: float) -> None:
    share, on_device_among = beside_a_blocked_request()
    for i in range(60):
        share.enter(request("patient", 2 + i), seconds, on_device_among)
        share.enter(request("busy", 100 + i), seconds, on_device_among)
    served = Counter(serve(share, 20))
    assert served == ({"patient": 20} if seconds <= BLOCKED_S else {"busy": 10, "patient": 10})


def test_a_tenant_blocked_for_long_lowers_no_other_ones_counter() -> None:
    share, on_device_among = beside_a_blocked_request()
    share.enter(request("new", 2), BLOCKED_S + 1, on_device_among)
    assert share.counter("new") == share.counter("busy")


def test_output_tokens_cost_more_than_prompt_tokens_and_more_with_their_context() -> None:
    short, long = request("short"), request("long")
    short.num_prompt_tokens = 2
    assert step_cost(short, 1) == 1
    for r, context in ((short, 1), (long, 10_240)):
        r.num_prompt_tokens = r.num_computed = r.num_paid = context
    assert step_cost(short, 1) == pytest.approx(2, abs=0.01)
    assert step_cost(long, 1) == pytest.approx(12, abs=0.01)
    long.num_adapter_pages = 16
    assert step_cost(long, 1) == pytest.approx(14, abs=0.01)


def test_tokens_computed_again_cost_nothing() -> None:
    r = request("a")
    r.num_prompt_tokens, r.num_paid = 100, 120
    assert step_cost(r, 120) == 0
    assert step_cost(r, 121) == pytest.approx(2, abs=0.2)
    r.num_paid = 40
    assert step_cost(r, 99) == 59


def test_a_prompts_last_token_costs_what_an_output_token_does() -> None:
    """A request for one token after a cached prompt does the work of an output token."""
    classifies, streams = request("a"), request("b")
    classifies.num_prompt_tokens, classifies.num_computed = 4096, 4095
    streams.num_prompt_tokens, streams.num_computed = 1, 4095
    assert step_cost(classifies, 1) == step_cost(streams, 1) == 6
    classifies.num_computed = 4000
    assert step_cost(classifies, 96) == 95 + 6


def test_priority_orders_one_tenants_own_requests_only() -> None:
    share = FairShare()
    for r in (request("a", 0), request("b", 1), request("a", 2, priority=-5), request("a", 3, priority=-5)):
        enter(share, r)
    assert serve(share, 4, cost=0) == ["b", "a", "a", "a"]
    order = []
    for r in (request("a", 0), request("a", 2, priority=-5), request("a", 3, priority=-5)):
        enter(share, r)
    turns = share.turns([], None)
    while (r := turns.next(admits=True)) is not None:
        order.append(r.request_id)
    assert order == ["a2", "a3", "a0"]


def test_priorities_age_and_targets_come_first() -> None:
    """A priority is worth a waiting time, so a request of the lowest priority is first some day."""
    share = FairShare()
    low, target = request("a", 0, priority=9), request("a", 1)
    enter(share, low, now=0.0)
    enter(share, request("a", 2), now=0.0)
    target.ttft_target = 0.5
    enter(share, target, now=1.0)
    enter(share, request("a", 3), now=200.0)
    turns = share.turns([], None)
    assert [turns.next(admits=True).arrival_number for _ in range(4)] == [1, 2, 0, 3]


def test_within_the_slack_the_best_locality_is_first_and_beyond_it_the_least_served() -> None:
    for ahead, expected in ((90, "local"), (110, "least")):
        share = FairShare(slack=100)
        for tenant_id in ("least", "local"):
            enter(share, request(tenant_id, 0 if tenant_id == "least" else 1, adapter=tenant_id))
        share.add_service(request("local"), ahead)
        found = share.turns([], Resident({"local"})).next(admits=True)
        assert found is not None
        assert found.tenant_id == expected


@pytest.mark.parametrize("resident", [set[str](), {"older", "least"}])
def test_among_requests_of_equal_locality_the_least_served_is_first_also_within_the_slack(resident: set[str]) -> None:
    """Before, the oldest request was first, which is always that of the tenant with the longest queue."""
    share = FairShare(slack=100)
    enter(share, request("older", 0, adapter="older"))
    enter(share, request("least", 1, adapter="least"))
    share.add_service(request("older"), 90)
    found = share.turns([], Resident(resident)).next(admits=True)
    assert found is not None
    assert found.tenant_id == "least"


def test_every_admission_goes_to_the_tenant_that_is_least_served_by_then() -> None:
    share = FairShare()
    for i in range(64):
        enter(share, request("a", i))
    for i in range(64):
        enter(share, request("b", 64 + i))
    assert Counter(serve(share, 64, cost=3)) == {"a": 32, "b": 32}


def test_counters_do_not_pile_up_once_everybody_has_left() -> None:
    share = FairShare()
    for i in range(50):
        r = request(f"tenant-{i}")
        enter(share, r)
        share.add_service(r, 5)
        share.remove(r)
        share.leave(r)
    assert len(share) == 0
    assert share.counter("tenant-3") == 0.0


@pytest.mark.parametrize("slack", [0.0, 256.0])
def test_counters_of_tenants_that_came_and_went_do_not_pile_up(slack: float) -> None:
    """Counters do not pile up on an engine that is never idle. A tenant that was ahead is still ahead after a pause."""
    fair_share = FairShare(slack)
    busy, ahead = request("busy"), request("ahead")
    enter(fair_share, busy)
    enter(fair_share, ahead)
    fair_share.add_service(ahead, 10**9)
    fair_share.remove(ahead)
    fair_share.leave(ahead)
    for i in range(5000):
        passing = request(f"passing-{i}")
        enter(fair_share, passing)
        fair_share.add_service(passing, 5)
        fair_share.add_service(busy, 50)
        fair_share.remove(passing)
        fair_share.leave(passing)
    assert len(fair_share.tenants([], 0.0, 10_000)) < 200
    assert fair_share.counter("ahead") >= 10**9


def test_service_at_other_engines_counts() -> None:
    share = FairShare()
    for i in range(20):
        enter(share, request("spread", i, weight=2.0))
        enter(share, request("here", i))
    assert share.add_service_elsewhere({"spread": 100, "absent": 100}, 0.0) == 1
    assert serve(share, 5, cost=10) == ["here"] * 5
    assert set(serve(share, 2, cost=10)) == {"here", "spread"}


def test_a_tenant_that_is_served_faster_elsewhere_is_served_here_after_a_while() -> None:
    share = FairShare()
    for i in range(20):
        enter(share, request("spread", i))
        enter(share, request("here", i))
    share.add_service_elsewhere({"spread": 1e9}, ELSEWHERE_WAIT_S)
    assert "spread" not in serve(share, 5)
    share.add_service_elsewhere({"spread": 1e9}, ELSEWHERE_WAIT_S + 0.1)
    assert "spread" in serve(share, 2)
    # It has a request running, so the next one waits for its turn.
    share.add_service_elsewhere({"spread": 1e9}, 3 * ELSEWHERE_WAIT_S)
    assert "spread" not in serve(share, 5)


def test_a_tenant_that_is_served_faster_elsewhere_keeps_its_debt_to_this_engine() -> None:
    share = FairShare()
    for i in range(20):
        enter(share, request("spread", i))
        enter(share, request("here", i))
    share.add_tenant_service("spread", 30)
    share.add_service_elsewhere({"spread": 1e9}, ELSEWHERE_WAIT_S + 0.1)
    assert share.counter("spread") == pytest.approx(30)
    assert serve(share, 3) == ["here"] * 3
    share.add_service_elsewhere({"spread": 0.0}, ELSEWHERE_WAIT_S + 0.1)
    assert share.counter("spread") == pytest.approx(30)


def test_service_elsewhere_that_is_balanced_erases_no_later_debt() -> None:
    share = FairShare()
    for i in range(20):
        enter(share, request("spread", i))
        enter(share, request("here", i))
    share.add_service_elsewhere({"spread": 100.0}, 0.0)
    assert serve(share, 10) == ["here"] * 10
    share.add_service_elsewhere({"spread": 0.0}, 1.0)
    share.add_tenant_service("spread", 30)
    share.add_service_elsewhere({"spread": 5.0}, ELSEWHERE_WAIT_S + 0.1)
    assert share.counter("spread") == pytest.approx(130)


def test_service_elsewhere_counts_for_a_tenant_that_is_still_the_least_served() -> None:
    share = FairShare()
    for i in range(20):
        enter(share, request("spread", i))
        enter(share, request("here", i))
    share.add_tenant_service("here", 100)
    share.add_service_elsewhere({"spread": 60}, ELSEWHERE_WAIT_S + 0.1)
    assert share.counter("spread") == pytest.approx(60)


def test_the_anonymous_tenant_shares_the_engine_like_any_other() -> None:
    share = FairShare()
    enter(share, request("", 0))
    assert share.step_target(0.0) is None
    enter(share, request("a", 1))
    assert share.step_target(0.0) is not None


def test_the_targets_of_a_tenant_are_reported_for_a_minute() -> None:
    share = FairShare()
    first = request("a")
    enter(share, first)
    for is_met in (True, True, False):
        share.count_target(first, is_met=is_met)
    [state] = share.tenants([], 1.0, 9)
    assert state.goodput == pytest.approx(2 / 3)
    share.tenants([], 2 * WINDOW_S, 9)
    [state] = share.tenants([], 4 * WINDOW_S, 9)
    assert state.goodput is None


@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_a_stream_whose_blocks_would_go_gives_way_only_for_a_large_difference(keeps_blocks: bool) -> None:
    """The claimant's tenant has a stream already; computing 1,000 tokens again would cost more than it is behind."""
    share = FairShare()
    running = [request("light", 0), *(request("heavy", i) for i in range(1, 9))]
    for one in running:
        enter(share, one)
        share.remove(one)
        one.start(0)
        one.seat, one.num_computed = one.arrival_number, 1000
    claimant = request("light", 9)
    enter(share, claimant)
    share.add_service(running[1], 600.0)
    found = share.preemptible(claimant, running, 0.0, keeps_blocks=keeps_blocks)
    assert [one.arrival_number for one in found] == ([8, 7, 6, 5, 4, 3, 2, 1] if keeps_blocks else [])
    share.add_service(running[1], 5000.0)
    assert share.preemptible(claimant, running, 0.0, keeps_blocks=False)
