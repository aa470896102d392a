"""Foreign texts with escapes, within a limit."""

import pytest

from wire.escaping import escaped


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("é \x1b[2J\n\ud800", None, r"é \x1b[2J\n\ud800"),
        ("a" * 999, None, "a" * 999),
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abc..."),
        ("ab\n\n", 6, r"ab\n\n"),
        ("ab\n\n\n", 6, r"ab\..."),
    ],
)
def test_a_text_is_escaped_and_cut(text: str, limit: int | None, expected: str):
    assert escaped(text, limit) == expected
