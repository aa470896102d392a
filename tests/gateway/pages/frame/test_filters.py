"""Filters of the templates."""

from datetime import UTC, datetime

import pytest
from markupsafe import Markup

from gateway.pages.frame.filters import in_hour, labelled, number
from gateway.pages.widgets.tables import Column


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


def test_a_use_known_to_the_hour_is_not_shown_to_the_minute():
    now = datetime(2026, 11, 23, 19, 47, tzinfo=UTC)
    assert "less than 1 h ago" in in_hour(now.replace(minute=0), now)
    assert "2 h ago" in in_hour(now.replace(hour=17, minute=0), now)
    assert "–" in in_hour(None, now)


def test_the_cells_of_a_row_have_the_titles_of_their_columns():
    columns = [Column(title.lower(), title) for title in ("Name", "Code & text", "A", "B", "Own", "Size", "")]
    row = Markup(
        '<th scope="row">&lt;td&gt;</th><td class="wrap">x</td><td colspan="2"></td><td data-label="Mine">y</td>'
        '<td class="n">1</td><td>act</td><td>more</td>'
    )
    assert labelled(row, columns) == (
        '<th scope="row">&lt;td&gt;</th><td class="wrap" data-label="Code &amp; text">x</td><td colspan="2"></td>'
        '<td data-label="Mine">y</td><td class="n" data-label="Size">1</td><td>act</td><td>more</td>'
    )
