"""Credit of tenants that begin to wait: at most the slack, and never twice."""

from collections import Counter

from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.request import Request
from tests.engine.scheduling.policies.test_fair_share import enter, request


def test_idling_earns_at_most_the_slack() -> None:
    """Before, a tenant that had waited for nothing had no credit for its next burst."""
    share = FairShare(slack=100)
    enter(share, busy := request("busy"))
    for number in range(5):
        share.add_service(busy, 1_000)
        enter(share, idle := request("idle", 1 + number))
        assert share.counter("busy") - share.counter("idle") == 100
        share.add_service(idle, 10)
        share.remove(idle)
        share.leave(idle)


def test_a_large_slack_gives_no_right_to_others_seats() -> None:
    share = FairShare(slack=5_000, preempt_behind=200)
    enter(share, busy := request("busy"))
    share.add_service(busy, 10_000)
    enter(share, request("idle", 1))
    assert share.counter("busy") - share.counter("idle") == 100


def test_tenants_that_begin_to_wait_one_after_the_other_do_not_add_up_their_credits() -> None:
    share = FairShare(slack=100)
    enter(share, busy := request("busy"))
    share.add_service(busy, 1_000)
    for number in range(50):
        enter(share, request(f"new-{number}", 1 + number))
    assert {share.counter(f"new-{number}") for number in range(50)} == {900}


def test_pauses_give_a_tenant_no_more_than_the_slack_over_its_share() -> None:
    """It comes with a burst whenever it is behind by the slack, and leaves once it has caught up."""
    share, served = FairShare(slack=100), Counter[str]()
    for number in range(100):
        enter(share, request("busy", number))
    waiting: list[Request] = []
    for number in range(100, 2_000):
        if not waiting and share.counter("pauses") <= share.counter("busy") - 100:
            waiting = [request("pauses", number)]
            enter(share, waiting[0])
        elif waiting and share.counter("pauses") > share.counter("busy"):
            share.remove(waiting[0])
            share.leave(waiting.pop())
        turn = share.turns([], None).next(admits=True)
        assert turn is not None
        share.add_service(turn, 10)
        served[turn.tenant_id] += 10
    assert served["pauses"] >= 9_000
    assert served["pauses"] - served["busy"] <= 100 + 10


def test_no_credit_is_given_twice_to_a_tenant_that_leaves() -> None:
    """The accounts of idle tenants are dropped, but not while they would have more credit without them."""
    share = FairShare(slack=100)
    enter(share, busy := request("busy"))
    share.add_service(busy, 1_000)
    enter(share, first := request("returns", 1))
    share.add_service(first, 60)
    share.remove(first)
    share.leave(first)
    for number in range(200):
        enter(share, passing := request(f"passing-{number}", 2 + number))
        share.add_service(passing, 200)
        share.remove(passing)
        share.leave(passing)
    enter(share, request("returns", 500))
    assert share.counter("returns") == 960
