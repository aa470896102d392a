"""Reports of benchmarks that are printed and kept in a file."""

from collections.abc import Sequence
from pathlib import Path


def publish(lines: Sequence[str], out: Path | None) -> None:
    """Print a report and, with `out`, append it there."""
    print("\n".join(lines))
    if out is not None:
        with out.open("a") as file:
            file.write("\n".join(["", *lines, ""]))
