"""A request is charged what its engines have computed: whatever is cached, cancelled, refused or tried again."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import BadRequest, GatewayError, Unavailable, UpstreamFailed
from gateway.fleet.calls.call import EngineGone, EngineRefused, EngineWithdrew
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.service_meter import Reported, ServiceMeter
from wire.costs import OUTPUT_TOKEN, PROMPT_TOKEN


@dataclass
class Engine:
    """An engine, and the service that it is said to have given. reports: one after the other. posts: the calls of
    `note_posted`; nothing is posted to an engine that is not reached.
    """

    reports: list[Reported]
    ends: Callable[[], Exception] | None = None
    posts: tuple[bool, ...] = (True,)
    charges: list[float] = field(default_factory=list)


def refused(error: type[GatewayError], status: int | None) -> Callable[[], Exception]:
    return lambda: EngineRefused(error("no"), status)


# Ends of an attempt without an answer, and whether its engine may have computed tokens.
WITHOUT_ANSWER: dict[str, tuple[Callable[[], Exception], bool]] = {
    "not reached": (lambda: EngineGone(may_have_read=False), False),
    "died": (lambda: EngineGone(may_have_read=True), True),
    "withdrew": (lambda: EngineWithdrew(Unavailable("no"), 503), False),
    "unsupported": (lambda: EngineRefused(BadRequest("no"), 400, unsupported=True), False),
    "bad request": (refused(BadRequest, 400), False),
    "not found": (refused(UpstreamFailed, 404), False),
    "overloaded": (refused(Unavailable, 503), False),
    "failed": (refused(UpstreamFailed, 500), True),
    "timed out": (refused(UpstreamFailed, None), True),
}


@dataclass
class Tenant:
    """A tenant's counter, and what it is charged. orders: the counter by which it is ordered, after each report."""

    counters: ServiceCounters = field(default_factory=ServiceCounters)
    charges: list[float] = field(default_factory=list)
    orders: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counters.observe_service = lambda _, service: self.charges.append(service)
        self.counters.enter("acme", 1.0)

    def serve(self, prompt: int, engines: list[Engine], *, is_admitted: bool = True) -> None:
        """Serve a request by these engines in turn."""
        reported = Reported()
        meter = ServiceMeter(prompt, lambda: reported)
        if is_admitted:
            meter.admit(self.counters, "acme")
        for engine in engines:
            reported = Reported()
            with suppress(EngineGone, EngineRefused), meter.attempt(engine.charges.append):
                self.orders.append(self.counters.counter("acme"))
                for is_posted in engine.posts if engine.ends is not WITHOUT_ANSWER["not reached"][0] else ():
                    meter.note_posted(is_posted)
                for report in engine.reports:
                    reported = report
                    meter.update()
                    self.orders.append(self.counters.counter("acme"))
                if engine.ends is not None:
                    raise engine.ends()
        meter.end()
        assert self.counters.counter("acme") == self.counters.received("acme") == sum(self.charges)


@pytest.mark.parametrize(("how", "ending"), WITHOUT_ANSWER.items())
@pytest.mark.parametrize("generated", [0, 5])
def test_an_attempt_without_an_answer_costs_a_prompt_that_may_be_computed(
    how: str, ending: tuple[Callable[[], Exception], bool], generated: int
):
    """Reports of a whole answer that is being generated have no count of cached tokens."""
    failed = Engine([Reported(None, generated)], ending[0])
    answered = Engine([Reported(36, 1), Reported(36, 10)])
    computed = ending[1] or generated > 0
    expected = (4036 * PROMPT_TOKEN if computed else 0.0) + generated * OUTPUT_TOKEN, 36 * PROMPT_TOKEN + 20
    tenant = Tenant()
    tenant.serve(4036, [failed, answered])
    assert (sum(failed.charges), sum(answered.charges)) == expected, how
    assert sum(tenant.charges) == sum(expected)


@pytest.mark.parametrize("posts", [(), (True, False)], ids=["first load", "load after a refused request"])
@pytest.mark.parametrize("ends", [None, refused(UpstreamFailed, None), lambda: EngineGone(may_have_read=True)])
def test_a_load_that_fails_or_is_left_costs_no_prompt(ends: Callable[[], Exception] | None, posts: tuple[bool, ...]):
    loading, tenant = Engine([], ends, posts), Tenant()
    tenant.serve(4036, [loading])
    assert tenant.charges == loading.charges == []


def test_each_attempt_posts_for_itself():
    answered, loading, tenant = Engine([], refused(Unavailable, 503)), Engine([], posts=()), Tenant()
    tenant.serve(4036, [answered, loading])
    assert tenant.charges == []


def test_a_request_without_an_attempt_costs_nothing():
    tenant = Tenant()
    tenant.serve(4036, [])
    tenant.serve(4036, [], is_admitted=False)
    assert tenant.charges == []


def test_a_cached_prompt_is_expected_in_full_until_the_first_report():
    """A tenant's next admission is ordered by the whole prompt, but nobody is charged the cached tokens."""
    engine, tenant = Engine([Reported(), Reported(36, 1), Reported(36, 2)]), Tenant()
    tenant.serve(4036, [engine])
    assert tenant.orders == [4036, 4036, 36 + 2, 36 + 4]
    assert tenant.charges == engine.charges == [36 + 2, 2]


def test_a_tenant_that_begins_is_not_raised_over_anothers_cached_prompts():
    counters = ServiceCounters()
    counters.enter("cached", 1.0)
    reported = Reported()
    meter = ServiceMeter(4036, lambda: reported)
    meter.admit(counters, "cached")
    with meter.attempt(lambda _: None):
        counters.enter("late", 1.0)
        assert counters.counter("cached") == 4036
        assert counters.counter("late") == 0
        reported = Reported(36, 1)
        meter.update()
    assert counters.counter("cached") == 38


def test_an_engine_is_not_charged_a_count_that_may_fall():
    """Two prompts of 2,000 tokens: the second one's cached tokens are reported when it begins."""
    engine, tenant = Engine([Reported(2000, 1, is_final=False), Reported(36, 3, is_final=True)]), Tenant()
    tenant.serve(4000, [engine])
    assert engine.charges == tenant.charges == [2, 36 + 4]
    assert tenant.orders == [4000, 4002, 42]


def test_a_client_that_leaves_pays_for_the_prompt_by_the_last_report():
    for last, prompt in ((Reported(None, 3), 4036), (Reported(36, 3), 36), (Reported(2000, 3, is_final=False), 2000)):
        engine, tenant = Engine([last]), Tenant()
        tenant.serve(4036, [engine])
        assert sum(tenant.charges) == sum(engine.charges) == prompt + 6


@st.composite
def attempts(draw: st.DrawFn, prompt: int) -> Engine:
    """Return an engine whose reports grow; the count of computed prompt tokens falls until it is final."""
    ending = draw(st.none() | st.sampled_from(sorted(WITHOUT_ANSWER)))
    known_from, final_from = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    computed, completion, reports = prompt, 0, list[Reported]()
    for number in range(draw(st.integers(0, 5))):
        completion += draw(st.integers(0, 9))
        if number <= final_from:
            computed = draw(st.integers(0, computed))
        known = computed if ending is None and number >= known_from else None
        reports.append(Reported(known, completion, number >= final_from))
    return Engine(reports, None if ending is None else WITHOUT_ANSWER[ending][0])


def executed(prompt: int, engine: Engine) -> float:
    """Return what the engine has computed, in cost units; the whole prompt if it does not say and may have."""
    last = engine.reports[-1] if engine.reports else Reported()
    may_have = engine.ends is None or last.completion or dict(WITHOUT_ANSWER.values())[engine.ends]
    unknown = prompt if may_have else 0
    return (unknown if last.prompt is None else last.prompt) * PROMPT_TOKEN + last.completion * OUTPUT_TOKEN


@settings(deadline=None)
@given(st.data(), st.integers(0, 5000))
def test_charges_add_up_to_what_was_executed(data: st.DataObject, prompt: int):
    engines = data.draw(st.lists(attempts(prompt), max_size=4).filter(is_possible))
    tenant = Tenant()
    tenant.serve(prompt, engines)
    costs = [executed(prompt, engine) for engine in engines]
    assert [sum(engine.charges) for engine in engines] == costs
    assert sum(tenant.charges) == sum(costs)
    assert all(charge > 0 for charge in tenant.charges)


def is_possible(engines: list[Engine]) -> bool:
    """Return whether only the last attempt has an answer."""
    return all(engine.ends is not None for engine in engines[:-1])
