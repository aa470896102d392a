"""Amounts of money as text."""

import pytest

from wire.money import exact_money, format_money


@pytest.mark.parametrize(
    ("micro_units", "exact", "shown"),
    [
        (0, "0.00", "0.00"),
        (1, "0.000001", "0.000001"),
        (12_500_000, "12.50", "12.50"),
        (1_212_500_000, "1212.50", "1,212.50"),
        (10**15, "1000000000.00", "1,000,000,000.00"),
    ],
)
def test_amounts_are_exact(micro_units, exact, shown):
    assert exact_money(micro_units) == exact
    assert format_money(micro_units) == shown
    assert format_money(micro_units, "EUR") == f"{shown} EUR"
