"""Comparison of two reports: relative changes, and whether they exceed the spread of repeated runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loraplex.bench.report import COMPARED, COMPARED_FAIRNESS, ISOLATION
from loraplex.bench.report_file import Range, Ranges, Report
from loraplex.bench.table import TOTAL
from loraplex.bench.terminal import echo, print_table

MORE_IS_BETTER = dict((*COMPARED, (ISOLATION, False), *COMPARED_FAIRNESS))
HEADINGS = ("", "figure", "before", "after", "change", "")
# The hash of all planned requests in a report's load.
PLAN = ("plan", "sha256")
# Maximum number of notes on different loads.
MAX_DIFFERENCES = 20


@dataclass(frozen=True, slots=True)
class Change:
    """A figure's medians in two reports; None: that report lacks it.

    relative: None without both, or if it is not finite. verdict: `better`, `worse`, `within noise` (the ranges of the
    runs overlap), `same`, `unknown` without repeats, `only before` or `only after`.
    """

    group: str
    figure: str
    before: float | None
    after: float | None
    relative: float | None
    verdict: str


def changes(before: Report, after: Report) -> Iterator[Change]:
    """Yield each known figure of either report: of all requests, of each tenant, and of fairness."""
    old, new = before.summary, after.summary
    pairs: list[tuple[str, Ranges, Ranges]] = [(TOTAL, old.all, new.all)]
    names = list(old.tenants | new.tenants)
    # The figures of an only tenant are those of all requests.
    if len(names) > 1:
        pairs += [(name, old.tenants.get(name, {}), new.tenants.get(name, {})) for name in names]
    pairs.append(("fairness", old.fairness, new.fairness))
    repeated = min(len(before.runs), len(after.runs)) > 1
    for group, one, other in pairs:
        for figure in MORE_IS_BETTER:
            match one.get(figure), other.get(figure):
                case Range() as first, Range() as second:
                    yield _change(group, figure, first, second, repeated=repeated)
                case Range() as first, None:
                    yield Change(group, figure, _number(first.median), None, None, "only before")
                case None, Range() as second:
                    yield Change(group, figure, None, _number(second.median), None, "only after")


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _change(group: str, figure: str, old: Range, new: Range, *, repeated: bool) -> Change:
    before, after = _number(old.median), _number(new.median)
    if before == after:
        verdict = "same"
    elif not repeated:
        verdict = "unknown"
    elif _number(old.min) <= _number(new.max) and _number(new.min) <= _number(old.max):
        verdict = "within noise"
    else:
        verdict = "better" if (after > before) == MORE_IS_BETTER[figure] else "worse"
    relative = (after - before) / before if before and math.isfinite(before) and math.isfinite(after) else None
    return Change(group, figure, before, after, relative, verdict)


def print_comparison(before: Report, after: Report) -> None:
    """Print a table of the changes, and notes on what makes the reports hard to compare."""
    rows = [
        (
            *(change.group, change.figure, _shown(change.before), _shown(change.after)),
            *("-" if change.relative is None else f"{100 * change.relative:+.1f} %", change.verdict),
        )
        for change in changes(before, after)
    ]
    print_table(HEADINGS, rows, left={0, 1, 5}, width=110)
    for note in notes(before, after):
        echo(f"note: {note}")


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return "not served" if math.isinf(value) else f"{value:.4g}"


def notes(before: Report, after: Report) -> list[str]:
    """Return reasons to distrust a comparison."""
    found = differences(before, after)
    counts = [len(report.runs) for report in (before, after)]
    if min(counts) < 2:
        found.append("a report has a single run, so its noise is unknown; use --repeat 3 or more")
    else:
        found.append(f"within noise: the ranges of the {counts[0]} and {counts[1]} runs overlap")
    for name, report in (("before", before), ("after", after)):
        found += [f"{name}: {warning}" for warning in report.warnings]
    return found


def differences(before: Report, after: Report) -> list[str]:
    """Return notes on what the two reports measured or required differently, each with both values."""
    old, new = before.load.values(), after.load.values()
    names = [name for name in before.summary.tenants if name in after.summary.tenants]
    paths = [path for path in old | new if path[0] != "tenants" or path[1] in names]
    found = [path for path in paths if path != PLAN and _stated(old, path) != _stated(new, path)]
    notes_ = ["the two reports are of different plans"] if old[PLAN] != new[PLAN] else []
    notes_ += [
        f"different {' '.join(path)}: {_stated(old, path)} before, {_stated(new, path)} after"
        for path in found[:MAX_DIFFERENCES]
    ]
    if (more := len(found) - MAX_DIFFERENCES) > 0:
        notes_.append(f"{more} more values of the loads differ")
    return notes_


def _stated(load: dict[tuple[str, ...], Any], path: tuple[str, ...]) -> str:
    """Return a load's value as text. Reports of older releases lack some."""
    if path not in load:
        return "not stated"
    return "none" if load[path] is None else str(load[path])
