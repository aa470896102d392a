"""Periods of budgets, and the words about them."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.kinds import PERIOD_BY_LETTER, ROLLING_BUDGET
from gateway.limits.periods import period_end, period_start, period_words


@pytest.mark.parametrize(
    ("kind", "start", "end"),
    [
        ("j", "2026-11-25", "2026-11-26"),
        ("w", "2026-11-23", "2026-11-30"),
        ("b", "2026-11-01", "2026-12-01"),
        ("l", "2026-10-27", "2026-11-26"),
    ],
)
def test_periods_around_a_wednesday(kind: str, start: str, end: str):
    now = datetime(2026, 11, 25, 13, 14, tzinfo=UTC)
    assert [f"{period_start(kind, now):%Y-%m-%d}", f"{period_end(kind, now):%Y-%m-%d}"] == [start, end]


@given(
    kind=st.sampled_from(sorted(PERIOD_BY_LETTER.keys() - ROLLING_BUDGET.keys())), seconds=st.integers(0, 4_000_000_000)
)
def test_calendar_periods_follow_each_other(kind: str, seconds: int):
    now = datetime.fromtimestamp(seconds, UTC)
    start, end = period_start(kind, now), period_end(kind, now)
    assert start <= now < end
    assert period_start(kind, end) == end
    assert period_start(kind, end - timedelta(microseconds=1)) == start


def test_words():
    words = [period_words(kind) for kind in "jwbl"]
    assert words == ["Today's", "This week's", "This month's", "The last 30 days'"]
