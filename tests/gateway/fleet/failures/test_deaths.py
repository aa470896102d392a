"""Evidence against requests, adapters and tenants from the deaths of engines."""

import pytest

from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.deaths import LATE_SECONDS, LIMITS, TENANT, UNKNOWN_TENANTS, Deaths, Suspicion
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
    deaths.note_survived(REQUEST)
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
            deaths.note_process_end("two")
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
