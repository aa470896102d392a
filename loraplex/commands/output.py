"""Output of the commands: tables for people and awk, the gateway's JSON for programs."""

import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import click

from loraplex.commands.values import MICRO_UNITS, limit_names

BUDGET = "budget_per_month"
_NUMBER = re.compile(r"-?[\d.]+")


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`; the command receives it as `as_json`."""
    flag = click.option("--json", "as_json", is_flag=True, help="Print the API's JSON, with amounts in micro-units.")
    return flag(command)


def money(micro_units: int) -> str:
    """Return an exact amount of the deployment's currency, with at least two decimals."""
    whole, _, part = f"{Decimal(micro_units) / MICRO_UNITS:f}".partition(".")
    return f"{whole}.{part:0<2}"


def moment(text: str) -> str:
    """Return a time of the API in UTC, without fractions of a second."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def limits_text(row: dict[str, Any]) -> str | None:
    """Return a row's limits that are set, as one table cell; None if none is set."""
    limits = {name: row[name] for name in limit_names() if row.get(name) is not None}
    if BUDGET in limits:
        limits[BUDGET] = money(limits[BUDGET])
    return ",".join(f"{name}={value}" for name, value in limits.items()) or None


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print aligned columns, one line per row, which also suit awk. Numbers are right-aligned."""
    table = [[_cell(column, row.get(column)) for column in columns] for row in rows]
    numeric = [_is_numeric([line[i] for line in table]) for i in range(len(columns))]
    table.insert(0, [column.upper() for column in columns])
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        cells = zip(line, widths, numeric, strict=True)
        click.echo("  ".join(c.rjust(width) if right else c.ljust(width) for c, width, right in cells).rstrip())


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
            return ",".join(map(str, value)) or "-"
        case str() if column.endswith("_at"):
            return moment(value)
    return str(value)
