"""Periods in words: the period that is meant, with times where days do not suffice."""

from datetime import datetime

import pytest

from gateway.pages.widgets.periods import range_text


@pytest.mark.parametrize(
    ("since", "until", "text"),
    [
        ("2026-11-01T00:00", "2026-12-01T00:00", "1 Nov 2026 to 30 Nov 2026"),
        ("2026-11-01T00:00", "2026-11-02T00:00", "1 Nov 2026"),
        ("2026-11-01T00:00", "2026-11-01T03:00", "1 Nov 2026, 00:00 to 03:00 UTC"),
        ("2026-12-31T22:00", "2027-01-01T00:00", "31 Dec 2026 22:00 to 1 Jan 2027 00:00 UTC"),
    ],
)
def test_a_period_in_words(since: str, until: str, text: str):
    """The first hours of 1 November were `01 Nov to 01 Nov`, and October `01 Oct to 01 Nov`."""
    assert range_text(*(datetime.fromisoformat(f"{each}+00:00") for each in (since, until))) == text
