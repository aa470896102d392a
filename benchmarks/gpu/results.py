"""A report's results besides its page: every table as JSON, charts, and the predictions to compare them with."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.plot import Bar, Points, bar_chart, line_chart

PREDICTIONS = Path(__file__).parents[2] / "docs/lab-notes.md"

Table = dict[str, Any]


def tables(lines: Sequence[str]) -> list[Table]:
    """Return the Markdown tables of a report: the section's title, the columns, and the rows as text."""
    found: list[Table] = []
    section, is_open = "", False
    for line in "\n".join(lines).splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not line.startswith("|"):
            is_open = False
            continue
        cells = [cell.strip() for cell in line.strip("| \n").split(" |")]
        cells = [cell.lstrip("| ").strip() for cell in cells]
        if not is_open:
            found.append({"section": section, "columns": cells, "rows": []})
            is_open = True
        elif set(line) - set("|-: "):
            found[-1]["rows"].append(cells)
    return found


def predictions() -> list[str]:
    """Return the predicted figures, in Markdown."""
    text = PREDICTIONS.read_text().partition(": predictions for an H200\n")[2].partition("\n## ")[0]
    return ["## Predicted", *text.splitlines()]


def write(out: Path, commit: str, lines: Sequence[str], verdicts: list[dict[str, str | bool]]) -> list[str]:
    """Write the JSON file and the charts beside the page. Return the lines of the page that show the charts."""
    found = tables(lines)
    content = {"commit": commit, "verdicts": verdicts, "tables": found}
    out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    shown = []
    for name, draw in (("decode", _draw_decode), ("served", _draw_served)):
        chart = out.with_name(f"{out.stem}-{name}.svg")
        if draw(chart, found):
            shown.append(f"![{name}]({chart.name})")
    return shown


def _number(cell: str) -> float | None:
    """Return a cell's number; None if it has none."""
    with suppress(ValueError):
        return float(cell.replace(",", "").removesuffix("%"))
    return None


def _draw_decode(path: Path, found: Sequence[Table]) -> bool:
    """Draw the time of a decode step by batch and its floor. Return False if they were not measured."""
    series: dict[str, Points] = {}
    for table in found:
        if table["columns"][:4] != ["batch", "KV", "step, ms", "floor, ms"]:
            continue
        for size, name, taken, floor, *_ in table["rows"]:
            for label, cell in ((name, taken), (f"{name} (floor)", floor)):
                series.setdefault(label, []).append((float(size), float(cell)))
    series = {name: points for name, points in series.items() if len(points) > 1}
    if series:
        line_chart(path, "A decode step, Llama-3.1-8B's shapes", "batch", "ms", series)
    return bool(series)


def _draw_served(path: Path, found: Sequence[Table]) -> bool:
    """Draw the tokens a second of each table that has them. Return False if there is none."""
    panels: dict[str, list[Bar]] = {}
    for table in found:
        columns = table["columns"]
        if "tokens/s" not in columns or "batch" in columns:
            continue
        rates = [(row[0], _number(row[columns.index("tokens/s")])) for row in table["rows"]]
        panels[f"{table['section']}, tokens/s"] = [Bar(name, [rate]) for name, rate in rates if rate is not None]
    if panels:
        bar_chart(path, "Tokens a second", panels)
    return bool(panels)
