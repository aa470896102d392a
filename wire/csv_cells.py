"""Cells of CSV files that people open in a spreadsheet."""

from typing import Any

# Characters with which a spreadsheet begins a formula, in full width too.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def cell(value: Any) -> Any:
    """Return a value for CSV. A text that a spreadsheet would take for a formula gets an apostrophe in front."""
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
