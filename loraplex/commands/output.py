"""Output of the commands: tables for people and awk, the gateway's JSON for programs."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from loraplex.commands.values import limit_names
from wire.csv_cells import csv_lines
from wire.escaping import escaped
from wire.money import exact_money

# Names of the terms in money, as in gateway/limits/kinds.py, which the command line does not load at its start.
BUDGETS = tuple(
    f"{soft}budget_per_{period}" for soft in ("", "soft_") for period in ("day", "week", "month", "30_days")
)
_NUMBER = re.compile(r"-?[\d.]+")


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`; the command receives it as `as_json`."""
    flag = click.option("--json", "as_json", is_flag=True, help="Print the API's JSON.")
    return flag(command)


def moment(text: str) -> str:
    """Return a time of the API in UTC, without fractions of a second."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def limits_text(row: dict[str, Any]) -> str | None:
    """Return a row's limits that are set, as one table cell; None if none is set."""
    limits = {name: row[name] for name in limit_names() if row.get(name) is not None}
    limits |= {name: exact_money(limits[name]) for name in BUDGETS if name in limits}
    return ",".join(f"{name}={value}" for name, value in limits.items()) or None


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print CSV. Text that a spreadsheet would run as a formula is escaped."""
    lines = csv_lines([columns, *([row.get(name) for name in columns] for row in rows)], end="\n")
    click.echo(lines, nl=False)


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print aligned columns, one line per row, so that awk can read them."""
    for line in table_lines(rows, columns):
        click.echo(line)


def table_lines(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table with its header. Numbers are right-aligned."""
    table = [[_cell(column, row.get(column)) for column in columns] for row in rows]
    numeric = [_is_numeric([line[i] for line in table]) for i in range(len(columns))]
    table.insert(0, [column.upper() for column in columns])
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in table
    ]


def _is_numeric(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell != "-"]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)


def _cell(column: str, value: Any) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return escaped(",".join(map(str, value))) or "-"
        case str() if column.endswith("_at"):
            return moment(value)
    return escaped(str(value))
