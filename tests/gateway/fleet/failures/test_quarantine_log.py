"""The announcing process of a quarantine that several have reported."""

import pytest

from gateway.fleet.failures.deaths import LATE_SECONDS, Deaths
from gateway.fleet.failures.quarantine_log import QuarantineLog
from gateway.fleet.failures.shared_deaths import Entry, Report
from tests.gateway.fleet.failures.test_deaths import REQUEST, note
from tests.gateway.fleet.failures.test_quarantine import Clock


@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize(("other", "is_own"), [(1, True), (3, False)])
def test_the_process_with_the_last_entry_announces(other: int, is_own: bool, is_read_first: bool):
    """Another process's entry may be read before the answer of Redis with the own entry's id has arrived."""
    counted: list[str] = []
    deaths = Deaths(600.0, clock := Clock())
    log = QuarantineLog(deaths, counted.append)
    for number in range(2):
        note(deaths, clock, f"e{number}", "v")
    entry = Entry((other,), "two", Report("e1", ["v"], [REQUEST]), 0.0)
    log.note_own([REQUEST])
    if is_read_first:
        log.note_other(entry)
        log.note_sent([REQUEST], (2,))
    else:
        log.note_sent([REQUEST], (2,))
        log.note_other(entry)
    log.announce()
    assert counted == ["request"] * is_own
    assert [period.suspect for period in log.take_begun()] == [REQUEST] * is_own


@pytest.mark.parametrize("answers", [False, True])
def test_a_quarantine_is_announced_once_every_process_has_answered(answers: bool):
    """A process announced it by a death that was complete, while the other's later entry for the next was not read."""
    counted: list[str] = []
    deaths = Deaths(600.0, clock := Clock())
    log = QuarantineLog(deaths, counted.append)
    note(deaths, clock, "e0", "v")
    clock.now += 10.0
    deaths.apply(Report("e1", ["v"], [REQUEST], None, ["one", "two"]), clock(), "one")
    assert deaths.causes_of(REQUEST)
    log.note_own([REQUEST])
    log.note_sent([REQUEST], (1,))
    log.announce()
    assert counted == []
    if answers:
        report = Report("e1", ["v"], [REQUEST])
        deaths.apply(report, clock(), "two")
        log.note_other(Entry((2,), "two", report, 0.0))
    clock.now += LATE_SECONDS + 1
    log.announce()
    assert counted == ([] if answers else ["request"])
