"""Circuit breakers of an engine, by tenant and for all."""

from gateway.fleet.breaker import FAILURES_UNTIL_OPEN, Breakers
from tests.gateway.fleet.test_quarantine import Clock


def test_one_tenants_failures_open_a_breaker_for_it_alone():
    breakers = Breakers(Clock())
    for _ in range(10 * FAILURES_UNTIL_OPEN):
        breakers.sent("a")
        breakers.failed("a")
    assert not breakers.allows("a")
    assert breakers.allows("b")
    assert breakers.allows_some


def test_failures_of_two_tenants_in_a_row_open_it_for_all():
    breakers = Breakers(clock := Clock())
    for _ in range(FAILURES_UNTIL_OPEN):
        breakers.failed("a")
        breakers.failed("b")
    assert not breakers.allows("c")
    clock.now += 3600.0
    breakers.sent("c")
    assert not breakers.allows("d")
    breakers.began("c")
    breakers.succeeded("c")
    assert breakers.allows("d")


def test_a_success_between_them_keeps_it_closed():
    breakers = Breakers(Clock())
    for _ in range(10):
        breakers.failed("a")
        breakers.failed("b")
        breakers.succeeded("c")
    assert breakers.allows("c")


def opened() -> tuple[Breakers, Clock]:
    """Return breakers whose common one is open."""
    breakers = Breakers(clock := Clock())
    for _ in range(FAILURES_UNTIL_OPEN):
        breakers.failed("a")
        breakers.failed("b")
    assert not breakers.allows_some
    return breakers, clock


def test_a_tenants_failures_beside_a_single_one_of_another_open_none_for_all():
    breakers = Breakers(Clock())
    breakers.failed("b")
    for _ in range(10 * FAILURES_UNTIL_OPEN):
        breakers.failed("a")
    assert breakers.allows("c")
    breakers.failed("c")
    assert not breakers.allows_some, "of three tenants, two others failed too"


def test_a_tenant_that_fails_every_trial_blocks_no_other_one():
    breakers, clock = opened()
    for number in range(5):
        clock.now += 100.0
        assert breakers.allows("a")
        breakers.sent("a")
        assert breakers.allows("c") == (number > 0), "a second trial of the tenant is its own"
        breakers.began("a")
        breakers.failed("a")
        assert breakers.allows("c") == (number > 0)
    breakers.sent("c")
    breakers.began("c")
    breakers.succeeded("c")
    assert breakers.allows("d")


def test_a_tenants_failures_beside_anothers_trial_do_not_fail_it():
    breakers, clock = opened()
    clock.now += 100.0
    breakers.sent("c")
    breakers.failed("a")
    breakers.gave_up("a")
    assert not breakers.allows("d"), "the trial runs"
    breakers.began("c")
    assert breakers.allows("d")
    breakers.failed("a")
    assert breakers.allows("d")
    breakers.failed("c")
    assert not breakers.allows("d"), "the trial's answer broke"


def test_the_only_tenant_gets_an_engine_back():
    breakers, clock = opened()
    for _ in range(3):
        clock.now += 100.0
        assert breakers.allows("a")
        breakers.sent("a")
        breakers.failed("a")
    clock.now += 100.0
    breakers.sent("a")
    breakers.began("a")
    breakers.succeeded("a")
    assert breakers.allows("a")
    assert breakers.allows("b")


def test_a_trial_whose_client_leaves_gives_its_tenants_failures_no_weight():
    breakers, clock = opened()
    clock.now += 100.0
    breakers.sent("a")
    breakers.began("a")
    breakers.gave_up("a")
    breakers.failed("a")
    assert breakers.allows("c")
