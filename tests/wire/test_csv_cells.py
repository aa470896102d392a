"""Texts of tenants in CSV files are texts, whatever they begin with."""

import pytest

from wire.csv_cells import cell


@pytest.mark.parametrize(
    "given", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "\uff0b1", "\uff201"]
)
def test_a_text_is_no_formula(given: str):
    assert cell(given) == f"'{given}"


@pytest.mark.parametrize(("given", "expected"), [("a=1", "a=1"), ("", ""), (-1, -1), (None, "")])
def test_other_values_stay(given: object, expected: object):
    assert cell(given) == expected
