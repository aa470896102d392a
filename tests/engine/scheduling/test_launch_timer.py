"""Planning times of steps while a step is in flight."""

import pytest

from engine.scheduling.launch_timer import MAX_SHARE, LaunchTimer


def after(*are_late: bool, host: float = 0.0) -> LaunchTimer:
    timer = LaunchTimer()
    for is_late in are_late:
        timer.observe(host, is_late=is_late)
    return timer


def test_the_first_steps_are_planned_at_once():
    assert LaunchTimer().delay(1.0) == 0


def test_launches_in_time_delay_the_planning_up_to_the_limit():
    assert 0 < after(*[False] * 10).delay(1.0) < after(*[False] * 20).delay(1.0) < MAX_SHARE
    assert after(*[False] * 1000).delay(1.0) == MAX_SHARE


def test_a_late_launch_costs_as_much_as_twenty_in_time_bring():
    assert after(*[False] * 100, True).delay(1.0) == pytest.approx(after(*[False] * 80).delay(1.0))
    assert after(*[False] * 10, True, True).delay(1.0) == 0


def test_the_time_of_planning_is_left():
    timer = after(*[False] * 1000, host=0.25)
    assert timer.delay(1.0) == MAX_SHARE - 0.25
    assert timer.delay(0.2) == 0
    timer.observe(0.5, is_late=False)
    assert timer.delay(1.0) == MAX_SHARE - 0.5
    # A slow planning is forgotten.
    for _ in range(500):
        timer.observe(0.1, is_late=False)
    assert timer.delay(1.0) == MAX_SHARE - 0.1


def test_a_step_of_unknown_duration_delays_nothing():
    assert after(*[False] * 1000).delay(0.0) == 0
