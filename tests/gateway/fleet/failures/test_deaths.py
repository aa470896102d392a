"""Evidence against requests, adapters and tenants from the deaths of engines."""

import pytest

from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.death import LATE_SECONDS, UNKNOWN_TENANTS
from gateway.fleet.failures.deaths import LIMITS, SUSPECTED_DEATHS, TENANT, Deaths, Suspicion
from gateway.fleet.failures.shared_deaths import Report
from tests.gateway.fleet.failures.test_quarantine import Clock

REQUEST = Suspect("request", "v", "a mark")
ALL = ["one", "two"]


@pytest.fixture
def deaths(clock: Clock) -> Deaths:
    return Deaths(600.0, clock)


def note(deaths: Deaths, clock: Clock, engine: str, *tenants: str, suspect: Suspect | None = REQUEST) -> None:
    """Note a death that all processes have reported."""
    clock.now += 10.0
    deaths.apply(Report(engine, [*tenants], [] if suspect is None else [suspect], None, ["one"]), clock(), "one")


def test_unknown_tenants_may_be_those_that_are_known_at_another_death(deaths: Deaths, clock: Clock):
    """A tenant was blamed because the one that was there as well was unknown at one of the two deaths."""
    deaths.apply(Report("e1", ["v"], [REQUEST], "i1", ALL), clock(), "one")
    note(deaths, clock, "e2", "v", "a")
    assert not deaths.causes_of(REQUEST)
    assert deaths.suspicion(REQUEST) == Suspicion({"a"}, 2)
    note(deaths, clock, "e3", "v")
    assert len(deaths.causes_of(REQUEST)) == 3


def test_tenants_that_kill_engines_in_turn_get_no_third_one_refused(deaths: Deaths, clock: Clock):
    """Its adapter is the only suspect of all deaths, and is quarantined as an adapter, but never was there alone."""
    adapter = Suspect("adapter", "v", "a digest")
    for number, attacker in enumerate("abaabab"):
        note(deaths, clock, f"e{number}", "v", attacker, suspect=adapter)
    assert deaths.causes_of(adapter)
    assert not deaths.causes_of(Suspect(TENANT, "v", ""))


def test_a_request_that_has_run_to_its_end_is_suspected_at_its_next_death_only(deaths: Deaths, clock: Clock):
    other = Suspect("request", "v", "another mark")
    for number in range(2):
        note(deaths, clock, f"e{number}", "v", suspect=other)
    assert deaths.causes_of(other)
    note(deaths, clock, "e2", "v", "b")
    assert deaths.suspicion(REQUEST) == Suspicion({"b"}, 1)
    deaths.clear(REQUEST)
    assert deaths.suspicion(REQUEST) is None
    note(deaths, clock, "e3", "v", "b")
    assert deaths.suspicion(REQUEST) == Suspicion({"b"}, 2)


@pytest.mark.parametrize(
    ("first", "second", "seconds", "is_same"),
    [
        ("i", "i", 300.0, True),
        ("i", "j", 3.0, False),
        (None, None, LATE_SECONDS - 1, True),
        (None, "i", LATE_SECONDS - 1, True),
        (None, None, LATE_SECONDS + 1, False),
    ],
)
def test_a_late_report_is_of_the_same_death_if_its_instance_shows_that(
    first: str | None, second: str | None, seconds: float, is_same: bool, deaths: Deaths, clock: Clock
):
    deaths.apply(Report("e", ["a"], [], first, ALL), clock(), "one")
    clock.now += seconds
    deaths.apply(Report("e", ["b"], [], second, ALL), clock(), "two")
    assert len(deaths.recent()) == (1 if is_same else 2)
    clock.now += 3.0
    deaths.apply(Report("e", ["c"], [], second, ALL), clock(), "two")
    assert len(deaths.recent()) == (2 if is_same else 3), "a process reports each death once"


def test_a_quarantine_lasts_from_the_newest_death_though_an_older_one_is_reported_last(deaths: Deaths, clock: Clock):
    for engine, age in (("e1", 100.0), ("e2", 10.0), ("e1", 100.0)):
        deaths.apply(Report(engine, ["v"], [REQUEST], engine, []), clock() - age, "one")
    assert [death.at for death in deaths.causes_of(REQUEST)] == [clock() - 100.0, clock() - 10.0]


def test_a_process_that_has_ended_has_reported_all(deaths: Deaths, clock: Clock):
    for number in range(2):
        clock.now += 10.0
        deaths.apply(Report(f"e{number}", ["v"], [REQUEST], f"i{number}", ALL), clock(), "one")
        if number == 0:
            assert not deaths.recent()[0].is_complete
            deaths.end("two")
    assert len(deaths.causes_of(REQUEST)) == 2, "also a death that it was expected to report, which is noted later"


def test_a_tenants_quarantine_needs_deaths_without_others_by_its_suspects(deaths: Deaths, clock: Clock):
    for number in range(2 * LIMITS[TENANT]):
        assert not deaths.causes_of(Suspect(TENANT, "v", "")), number
        note(deaths, clock, f"e{number}", "v", "b", suspect=Suspect("request", "v", f"{number // 2}"))
    for number in range(LIMITS[TENANT]):
        assert not deaths.causes_of(Suspect(TENANT, "v", "")), number
        note(deaths, clock, f"f{number}", "v", suspect=Suspect("request", "v", f"{number // 2}"))
    assert len(deaths.causes_of(Suspect(TENANT, "v", ""))) == LIMITS[TENANT]
    assert not deaths.causes_of(Suspect(TENANT, "b", ""))


def test_an_instance_dies_once_however_late_its_connections_break(deaths: Deaths, clock: Clock):
    """A slow client notices the break late. An adapter alone on an engine was quarantined after a single death."""
    suspects = [REQUEST, Suspect("adapter", "v", "a digest")]
    for instance in ("i", "j"):
        assert not any(deaths.causes_of(each) for each in suspects), instance
        for _ in range(max(LIMITS.values())):
            clock.now += 3.0
            deaths.apply(Report("e", ["v"], suspects, instance, ["one"]), clock(), "one")
    assert len(deaths.causes_of(REQUEST)) == 2
    assert not deaths.causes_of(suspects[1])
    assert not deaths.causes_of(Suspect(TENANT, "v", ""))


def test_a_break_of_a_former_instance_hides_no_cause_of_the_next_ones_death(deaths: Deaths, clock: Clock):
    """A stream held from an instance that drained broke at that moment; its other tenants are unknown."""
    deaths.apply(Report("e", ["v"], [REQUEST], "next", ["one"]), clock(), "one")
    deaths.apply(Report("e", ["v", UNKNOWN_TENANTS], [], "former", ["one"]), clock(), "one")
    assert [death.tenants for death in deaths.of(REQUEST)] == [{"v"}]


def suspect(number: int, tenant: str = "v") -> Suspect:
    return Suspect("request", tenant, f"{number}")


def is_refused(deaths: Deaths, tenant: str) -> bool:
    return bool(deaths.quarantines(tenant))


def test_a_tenant_is_suspected_by_deaths_with_different_requests_beside_others(deaths: Deaths, clock: Clock):
    for number in range(SUSPECTED_DEATHS):
        assert not deaths.is_suspected("v", "base")
        note(deaths, clock, f"e{number}", "v", "b", suspect=suspect(number))
    assert deaths.is_suspected("v", "base")
    assert deaths.is_suspected("b", "base"), "its requests have no name"
    assert not deaths.is_suspected("c", "base")
    assert not deaths.was_alone("v", "base")
    deaths.clear_tenant("v", "base", clock())
    assert not deaths.is_suspected("v", "base")
    assert deaths.is_suspected("v", "another base"), "its requests there may be the cause"
    for number in range(SUSPECTED_DEATHS):
        assert not deaths.is_suspected("v", "base")
        note(deaths, clock, f"f{number}", "v", "b", suspect=suspect(number))
    assert deaths.is_suspected("v", "base")
    clock.now += 601.0
    assert not deaths.is_suspected("v", "base")


def test_the_only_tenant_of_a_deployment_is_not_suspected(deaths: Deaths, clock: Clock):
    """Its engines may die for another reason, and no other tenant would gain from its refusal."""
    for number in range(2 * LIMITS[TENANT]):
        note(deaths, clock, f"e{number}", "v", suspect=suspect(number))
    assert not deaths.is_suspected("v", "base")
    assert not is_refused(deaths, "v")


def test_a_tenant_alone_at_deaths_after_those_beside_others_is_refused(deaths: Deaths, clock: Clock):
    note(deaths, clock, "d", "v", suspect=suspect(99))
    began = clock() + 10.0
    for number in range(SUSPECTED_DEATHS):
        note(deaths, clock, f"e{number}", "v", "b", suspect=suspect(number))
    for number in range(LIMITS[TENANT]):
        assert not is_refused(deaths, "v"), number
        note(deaths, clock, f"f{number}", "v", suspect=suspect(10 + number))
        assert deaths.was_alone("v", "base")
    [period] = deaths.quarantines("v")
    assert period.ends == began + 10.0 * (SUSPECTED_DEATHS - 1) + 600.0
    assert (period.suspect.kind, len(period.deaths)) == (TENANT, LIMITS[TENANT])
    assert deaths.quarantines() == [period]
    assert deaths.has_candidate("v")
    assert not is_refused(deaths, "b")
    assert not deaths.is_suspected("b", "base"), "the other tenant is the cause"
    # The last death beside another tenant shows that others were harmed.
    clock.now = began + 10.0 * (SUSPECTED_DEATHS - 1) + 599.0
    assert is_refused(deaths, "v")
    clock.now += 2.0
    assert not is_refused(deaths, "v")


def test_two_tenants_that_kill_in_turn_are_refused_and_a_third_one_is_not(deaths: Deaths, clock: Clock):
    for number, killer in enumerate("abab"):
        note(deaths, clock, f"e{number}", "v", killer, suspect=suspect(number))
        deaths.add(deaths.recent()[-1], [suspect(number, killer)])
    assert deaths.is_suspected("v", "base")
    assert not deaths.is_suspected("a", "base")
    note(deaths, clock, "f", "v", "a", "b", suspect=suspect(9))
    assert [deaths.is_suspected(each, "base") for each in "abv"] == [True] * 3
    for number in range(LIMITS[TENANT]):
        for killer in "ab":
            note(deaths, clock, f"{killer}{number}", killer, suspect=suspect(20 + number, killer))
    assert [is_refused(deaths, each) for each in "abv"] == [True, True, False]
    assert not deaths.causes_of(Suspect(TENANT, "v", ""))
    assert not deaths.is_suspected("v", "base")


@pytest.mark.parametrize("unknown", ["a process that has not answered", "tenants on a former instance"])
def test_a_death_with_unknown_tenants_is_no_evidence_against_a_suspected_one(
    unknown: str, deaths: Deaths, clock: Clock
):
    for number in range(SUSPECTED_DEATHS):
        note(deaths, clock, f"e{number}", "v", "b", suspect=suspect(number))
    for number in range(2 * LIMITS[TENANT]):
        clock.now += 10.0
        others, processes = ([], ALL) if unknown.startswith("a process") else ([UNKNOWN_TENANTS], [])
        deaths.apply(Report(f"f{number}", ["v", *others], [suspect(number)], None, processes), clock(), "one")
    assert not is_refused(deaths, "v")
    assert not deaths.was_alone("v", "base")


def test_an_operator_ends_suspicion_and_refusal_of_a_tenant(deaths: Deaths, clock: Clock):
    for number in range(SUSPECTED_DEATHS + LIMITS[TENANT]):
        others = ["b"] if number < SUSPECTED_DEATHS else []
        note(deaths, clock, f"e{number}", "v", *others, suspect=suspect(number))
    assert is_refused(deaths, "v")
    deaths.forget("v", clock())
    assert not is_refused(deaths, "v")
    assert not deaths.is_suspected("v", "base")
