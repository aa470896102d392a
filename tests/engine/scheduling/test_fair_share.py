"""The order of tenants."""

from collections import Counter

import pytest

from engine.scheduling.fair_share import DECODE_COST, FairShare
from engine.scheduling.request import NewRequest, Request, SamplingParams


def request(tenant: str, arrival: int = 0, *, weight: float = 1.0, priority: int = 0) -> Request:
    return Request(
        NewRequest(f"{tenant}{arrival}", [1], SamplingParams(), tenant=tenant, weight=weight, priority=priority),
        arrival=arrival,
    )


def serve(share: FairShare, n: int, tokens: int = 10) -> list[str]:
    """Take the next request n times, charging each for `tokens`."""
    order = []
    for _ in range(n):
        r = next(share.least_served_first())
        share.remove(r)
        share.charge(r, tokens)
        order.append(r.tenant)
    return order


def test_a_flood_by_one_tenant_does_not_delay_another() -> None:
    share = FairShare()
    for i in range(100):
        share.enter(request("flood", i))
    for i in range(3):
        share.enter(request("quiet", 100 + i))
    assert Counter(serve(share, 6)) == {"flood": 3, "quiet": 3}


@pytest.mark.parametrize("weight", [2.0, 4.0])
def test_service_follows_weight(weight: float) -> None:
    share = FairShare()
    for i in range(200):
        share.enter(request("heavy", i, weight=weight))
        share.enter(request("light", i))
    served = Counter(serve(share, 100))
    assert served["heavy"] / served["light"] == pytest.approx(weight, rel=0.1)


def test_idling_earns_no_credit() -> None:
    share = FairShare()
    idle = request("idle")
    share.enter(idle)
    serve(share, 1)
    for i in range(60):
        share.enter(request("busy", i))
    share.leave(idle)
    serve(share, 30)
    for i in range(60):
        share.enter(request("idle", 100 + i))
    assert Counter(serve(share, 20)) == {"busy": 10, "idle": 10}


def test_decode_tokens_cost_more_than_prompt_tokens() -> None:
    share = FairShare()
    prompt, decode = request("prompt"), request("decode")
    share.enter(prompt)
    share.enter(decode)
    decode.token_ids.append(5)
    decode.num_computed = 1
    share.charge(prompt, 10)
    share.charge(decode, 10)
    assert share.counter("decode") == DECODE_COST * share.counter("prompt")


def test_priority_orders_one_tenants_own_requests_only() -> None:
    share = FairShare()
    for r in (request("a", 0), request("b", 1), request("a", 2, priority=-5), request("a", 3, priority=-5)):
        share.enter(r)
    assert [r.request_id for r in share.least_served_first()] == ["b1", "a2", "a3", "a0"]


def test_counters_do_not_pile_up_once_everybody_has_left() -> None:
    share = FairShare()
    for i in range(50):
        r = request(f"tenant-{i}")
        share.enter(r)
        share.remove(r)
        share.charge(r, 5)
        share.leave(r)
    assert len(share) == 0
    assert share.counter("tenant-3") == 0.0


def test_counters_of_tenants_that_came_and_went_do_not_pile_up() -> None:
    """Counters do not pile up on an engine that is never idle. A tenant that was ahead is still ahead after a pause."""
    fair_share = FairShare()
    busy, ahead = request("busy"), request("ahead")
    fair_share.enter(busy)
    fair_share.enter(ahead)
    fair_share.charge(ahead, 10**9)
    fair_share.leave(ahead)
    for i in range(5000):
        passing = request(f"passing-{i}")
        fair_share.enter(passing)
        fair_share.charge(passing, 5)
        fair_share.charge(busy, 50)
        fair_share.leave(passing)
    assert len(fair_share._counters) < 200
    assert fair_share.counter("ahead") >= 10**9
