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
