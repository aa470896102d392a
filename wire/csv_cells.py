"""CSV that people open in a spreadsheet."""

import csv
import io
from collections.abc import Iterable
from datetime import datetime
from typing import Any

# Characters with which a spreadsheet begins a formula, in full width too.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def cell(value: Any) -> Any:
    """Return a value for CSV: a time in ISO 8601, a flag as `true` or `false`, an empty cell for None.

    A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat()
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def csv_lines(rows: Iterable[Iterable[Any]], end: str = "\r\n") -> str:
    """Return rows as lines of CSV. Every value goes through `cell`."""
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()
