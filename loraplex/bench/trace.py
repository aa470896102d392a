"""Traces: CSV files with a line per request (`timestamp,tenant,adapter,input,output`), read and written.

`timestamp` counts seconds from the start; input and output count tokens. The columns may have any order; `adapter` may
be absent or empty.
"""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("timestamp", "tenant", "adapter", "input", "output")
MAX_ROWS = 1_000_000


class TraceError(Exception):
    """A wrong trace; the message names the file, the line and the column."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a trace. line: its line in the file. adapter: None if the trace names none."""

    line: int
    timestamp: float
    tenant: str
    adapter: str | None
    input: int
    output: int


def read_trace(path: Path) -> list[Row]:
    """Return the trace's requests, sorted by time. Raises TraceError."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            columns = reader.fieldnames or []
            if missing := [name for name in COLUMNS if name != "adapter" and name not in columns]:
                raise TraceError(f"{path}:1: the column {missing[0]} is missing; expected {', '.join(COLUMNS)}")
            rows: list[Row] = []
            for values in reader:
                if len(rows) >= MAX_ROWS:
                    raise TraceError(f"{path}:{reader.line_num}: expected at most {MAX_ROWS} requests")
                rows.append(_row(path, reader.line_num, values))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: not a CSV file in UTF-8: {error}") from error
    return sorted(rows, key=lambda row: row.timestamp)


def write_trace(path: Path, rows: Iterable[Row]) -> None:
    """Write requests as a trace. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow((f"{row.timestamp:.6f}", row.tenant, row.adapter or "", row.input, row.output))


def _row(path: Path, line: int, values: dict[str, str | None]) -> Row:
    return Row(
        line,
        _number(path, line, values, "timestamp"),
        values["tenant"] or "",
        values.get("adapter") or None,
        _tokens(path, line, values, "input"),
        _tokens(path, line, values, "output"),
    )


def _number(path: Path, line: int, values: dict[str, str | None], column: str) -> float:
    text = values[column] or ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise TraceError(f"{path}:{line}: {column}: expected seconds from the start, 0 or more, got {text!r}")
    return value


def _tokens(path: Path, line: int, values: dict[str, str | None], column: str) -> int:
    text = values[column] or ""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 10_000_000):
        raise TraceError(f"{path}:{line}: {column}: expected a number of tokens, 1 or more, got {text!r}")
    return int(text)
