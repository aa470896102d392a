"""Texts of `loraplex adapter verify`."""

from loraplex.commands.adapters.verify import change_text


def test_a_change_shows_both_values():
    assert (
        change_text({"field": "divergence", "before": 0.49357799, "now": 0.46543612}) == "divergence 0.4936 -> 0.4654"
    )
    assert (
        change_text({"field": "engine_version", "before": "0.1.0", "now": "0.2.0"}) == "engine_version 0.1.0 -> 0.2.0"
    )
    assert change_text({"field": "reasons", "before": [], "now": [{"message": "bad"}]}) == "reasons"
