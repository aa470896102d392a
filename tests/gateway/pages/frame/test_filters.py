"""Filters of the templates."""

import pytest

from gateway.pages.frame.filters import number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0, "0"),
        (0.001_655, "0.0017"),
        (-0.05, "-0.05"),
        (2e-8, "0.00000002"),
        (0.25, "0.25"),
        (1234.5, "1,234.5"),
    ],
)
def test_a_number_is_never_rounded_to_nothing(value: float, shown: str):
    assert number(value) == shown
