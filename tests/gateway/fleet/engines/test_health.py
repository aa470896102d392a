"""Time of an engine's load, as its health checks show it."""

import time

import pytest

from gateway.fleet.engines.health import Condition, Health


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the present time, which a test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def load(condition: Condition) -> None:
    condition.change(Health.DOWN, "it loads its model")
    condition.note_loading(is_loading=True)


@pytest.mark.parametrize("health", [Health.MISCONFIGURED, Health.DOWN])
def test_time_of_a_fault_after_a_load_is_no_part_of_it(clock: list[float], health: Health):
    """An engine may have loaded hours before an operator makes it usable."""
    condition = Condition()
    load(condition)
    clock[0] += 20
    condition.note_loaded()
    condition.change(health, "its state could not be read")
    clock[0] += 10_000
    condition.note_loaded()
    condition.change(Health.UP, "")
    load(condition)
    assert condition.seconds_to_load() == 20


def test_a_load_that_ends_in_silence_has_no_time(clock: list[float]):
    condition = Condition()
    load(condition)
    clock[0] += 1
    condition.change(Health.SILENT, "it had no answer")
    clock[0] += 10_000
    condition.note_loaded()
    condition.change(Health.UP, "")
    load(condition)
    assert condition.seconds_to_load() == 0
