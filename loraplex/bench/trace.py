"""Traces: CSV files with a line per request (`timestamp,tenant,adapter,input,output`), read and written.

`timestamp` counts seconds from the trace's start; input and output count tokens. The columns may have any order;
`adapter` may be absent or empty.
"""

import csv
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loraplex.bench.arrivals import LONGEST

COLUMNS = ("timestamp", "tenant", "adapter", "input", "output")
MAX_ROWS = 1_000_000
MAX_TOKENS = 10_000_000
# Characters of a wrong value in an error.
MAX_SHOWN = 60
# The characters by which Python's `surrogateescape` replaces bytes that are not UTF-8.
UNDECODED = re.compile("[\udc80-\udcff]")
# A number as programs write it into CSV files. Python's `float` also reads `1_0`, `nan` and other scripts' digits.
NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


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
    if "\0" in str(path):
        raise TraceError(f"{path}: expected the name of a file")
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            return sorted(_rows(path, _checked(path, file)), key=lambda row: row.timestamp)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _checked(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines. Raises TraceError for bytes that are not UTF-8."""
    for number, line in enumerate(lines, 1):
        if UNDECODED.search(line):
            raise TraceError(f"{path}:{number}: expected UTF-8")
        yield line


def _rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    """Yield the requests in the file's order. A request's line is its first."""
    reader = csv.reader(lines, strict=True)
    columns: list[str] | None = None
    line, count = 1, 0
    try:
        for values in reader:
            if columns is None:
                columns = _header(path, values)
            elif values:
                count += 1
                if count > MAX_ROWS:
                    raise TraceError(f"{path}:{line}: expected at most {MAX_ROWS} requests")
                if len(values) > len(columns):
                    raise TraceError(f"{path}:{line}: expected {len(columns)} columns, got {len(values)}")
                yield _row(path, line, dict(itertools.zip_longest(columns, values, fillvalue="")))
            line = reader.line_num + 1
    except csv.Error as error:
        raise TraceError(f"{path}:{line}: not CSV: {error}") from error
    if columns is None:
        _header(path, [])


def _header(path: Path, columns: list[str]) -> list[str]:
    """Return the columns of the first line. Raises TraceError."""
    expected = f"expected {', '.join(COLUMNS)}"
    if missing := [name for name in COLUMNS if name != "adapter" and name not in columns]:
        raise TraceError(f"{path}:1: the column {missing[0]} is missing; {expected}")
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise TraceError(f"{path}:1: unknown column {_shown(unknown[0])}; {expected}")
    if len(set(columns)) < len(columns):
        raise TraceError(f"{path}:1: a column is there twice; {expected}")
    return columns


def write_trace(path: Path, rows: Iterable[Row]) -> None:
    """Write requests as a trace. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow((f"{row.timestamp:.6f}", row.tenant, row.adapter or "", row.input, row.output))


def _row(path: Path, line: int, values: dict[str, str]) -> Row:
    if not values["tenant"]:
        raise TraceError(f"{path}:{line}: tenant: expected a name, got ''")
    return Row(
        line,
        _number(path, line, values["timestamp"]),
        values["tenant"],
        values.get("adapter") or None,
        _tokens(path, line, values, "input"),
        _tokens(path, line, values, "output"),
    )


def _number(path: Path, line: int, text: str) -> float:
    if not NUMBER.fullmatch(text) or float(text) > LONGEST:
        expected = f"expected seconds from the start, 0 to {LONGEST}"
        raise TraceError(f"{path}:{line}: timestamp: {expected}, got {_shown(text)}")
    return float(text)


def _tokens(path: Path, line: int, values: dict[str, str], column: str) -> int:
    text = values[column]
    digits = text.lstrip("0")
    # Python reads no number of thousands of digits.
    is_short = text.isascii() and text.isdigit() and len(digits) <= len(str(MAX_TOKENS))
    if not (is_short and 1 <= int(digits or 0) <= MAX_TOKENS):
        expected = f"expected a number of tokens, 1 to {MAX_TOKENS}"
        raise TraceError(f"{path}:{line}: {column}: {expected}, got {_shown(text)}")
    return int(digits)


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")
