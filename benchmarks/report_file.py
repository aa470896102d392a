"""Reports of benchmarks that are printed and kept in a file."""

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any


def publish(lines: Sequence[str], out: Path | None) -> None:
    """Print a report and, with `out`, append it there."""
    print("\n".join(lines))
    if out is not None:
        with out.open("a") as file:
            file.write("\n".join(["", *lines, ""]))


def run_facts(module: str) -> dict[str, Any]:
    """Return the date, the machine, the commit and the command of this run of `python -m MODULE`."""
    command = ("git", "rev-parse", "--short", "HEAD")
    root = Path(__file__).parents[1]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    return {
        "date": str(date.today()),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
    }


def median_cell(values: Sequence[float]) -> str:
    """Return a table's cell: the median (least to greatest) of a figure's values, with three digits."""
    if not values:
        return ""
    middle, least, most = (
        f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        for value in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"
