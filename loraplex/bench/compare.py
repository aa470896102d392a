"""Comparison of two reports: relative changes, and whether they exceed the spread of repeated runs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from loraplex.bench.report import COMPARED, COMPARED_FAIRNESS, SCHEMA

MORE_IS_BETTER = dict((*COMPARED, *COMPARED_FAIRNESS))


class CompareError(Exception):
    """A file that is no report of this version; the message names it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in two reports: their medians. relative: None if the first is 0.

    verdict: `better`, `worse`, `within noise` (the ranges of the runs overlap), `same`, or `unknown` without repeats.
    """

    group: str
    figure: str
    before: float
    after: float
    relative: float | None
    verdict: str


def read_report(path: Path) -> dict[str, Any]:
    """Return a report. Raises CompareError."""
    try:
        report = json.loads(path.read_bytes())
        schema = report["schema"]
        runs = report["runs"]
    except OSError as error:
        raise CompareError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CompareError(f"{path}: not a report of loraplex bench --json") from error
    if schema != SCHEMA:
        raise CompareError(f"{path}: expected the schema {SCHEMA!r}, got {schema!r}")
    if not runs:
        raise CompareError(f"{path}: the report has no finished run")
    return report


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yield each figure that both reports have: of all requests, of each common tenant, and of fairness."""
    pairs = [("all", before["summary"]["all"], after["summary"]["all"])]
    pairs += [
        (name, figures, after["summary"]["tenants"][name])
        for name, figures in before["summary"]["tenants"].items()
        if name in after["summary"]["tenants"] and len(before["summary"]["tenants"]) > 1
    ]
    pairs.append(("fairness", before["summary"]["fairness"], after["summary"]["fairness"]))
    repeated = min(len(before["runs"]), len(after["runs"])) > 1
    for group, old, new in pairs:
        for figure, value in old.items():
            if figure in new:
                yield _change(group, figure, value, new[figure], repeated=repeated)


def _change(group: str, figure: str, old: Mapping[str, float], new: Mapping[str, float], *, repeated: bool) -> Change:
    before, after = old["median"], new["median"]
    if before == after:
        verdict = "same"
    elif not repeated:
        verdict = "unknown"
    elif old["min"] <= new["max"] and new["min"] <= old["max"]:
        verdict = "within noise"
    else:
        verdict = "better" if (after > before) == MORE_IS_BETTER[figure] else "worse"
    return Change(group, figure, before, after, (after - before) / before if before else None, verdict)


def print_comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Print a table of the changes, and notes on what makes the reports hard to compare."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading in ("", "figure", "before", "after", "change", ""):
        table.add_column(heading, justify="right" if heading in ("before", "after", "change") else "left")
    for change in changes(before, after):
        relative = "-" if change.relative is None else f"{100 * change.relative:+.1f} %"
        table.add_row(
            change.group, change.figure, f"{change.before:.4g}", f"{change.after:.4g}", relative, change.verdict
        )
    Console(width=110, highlight=False).print(table)
    for note in notes(before, after):
        click.echo(f"note: {note}")


def notes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return reasons to distrust a comparison."""
    found = []
    if before["load"]["plan"]["sha256"] != after["load"]["plan"]["sha256"]:
        found.append("the two reports are of different plans")
    counts = [len(report["runs"]) for report in (before, after)]
    if min(counts) < 2:
        found.append("a report has a single run, so its noise is unknown; use --repeat 3 or more")
    else:
        found.append(f"within noise: the ranges of the {counts[0]} and {counts[1]} runs overlap")
    for name, report in (("before", before), ("after", after)):
        found += [f"{name}: {warning}" for warning in report["warnings"]]
    return found
