"""Charts as SVG files without a plotting library: lines on logarithmic axes, and bars with the values of each run."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 40, 55
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a9e", "#c77d1e", "#4b4b4b")

Points = list[tuple[float, float]]


def line_chart(path: Path, title: str, x_label: str, y_label: str, series: dict[str, Points]) -> None:
    """Draw each series in the order given. A name that ends in " (floor)" is dashed, in the colour of its namesake."""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    low, high = 10 ** math.floor(math.log10(min(ys))), max(ys) * 1.15

    def at_x(x: float) -> float:
        span = math.log(xs[-1] / xs[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / xs[0]) / span

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(y / low) / math.log(high / low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">{x_label}</text>',
        f'<text transform="translate(18 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y_label}</text>',
    ]
    out += [f'<text x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>' for x in xs]
    for decade in range(round(math.log10(low)), math.ceil(math.log10(high))):
        for tick in (1, 2, 5):
            y = tick * 10.0**decade
            if low <= y <= high:
                line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"'
                out.append(f'<line {line} stroke="#dddddd"/>')
                out.append(f'<text x="{LEFT - 8}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    names = list(dict.fromkeys(name.removesuffix(" (floor)") for name in series))
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[names.index(name.removesuffix(" (floor)")) % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if name.endswith(" (floor)") else ""
        line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y, x = TOP + 18 * i, WIDTH - RIGHT + 14
        out.append(f'<line x1="{x}" x2="{x + 26}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{x + 32}" y="{y + 4}">{name}</text>')
    path.write_text("\n".join([*out, "</svg>"]) + "\n")


class Bar(NamedTuple):
    """A bar of a panel. values: one for each run; infinite ones are drawn to the panel's edge."""

    name: str
    values: Sequence[float]


def bar_chart(path: Path, title: str, panels: Mapping[str, Sequence[Bar]]) -> None:
    """Draw a panel of horizontal bars for each key. A bar ends at the median; each run's value is a dot."""
    columns, panel_width, bar, head = 2, 440, 20, 30
    most_bars = max((len(bars) for bars in panels.values()), default=0)
    panel_height = head + bar * most_bars + 14
    rows = math.ceil(len(panels) / columns)
    width, height = columns * panel_width + 20, 44 + rows * panel_height
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, (name, bars) in enumerate(panels.items()):
        left, top = 12 + number % columns * panel_width, 44 + number // columns * panel_height
        out.append(f'<text x="{left}" y="{top + 14}" font-weight="bold">{escape(name)}</text>')
        known = [value for each in bars for value in each.values if math.isfinite(value)]
        start, length = left + 60, panel_width - 170
        scale = length / (max(known, default=0.0) or 1.0)
        for place, each in enumerate(bars):
            y = top + head - 6 + place * bar
            colour = COLOURS[place % len(COLOURS)]
            out.append(f'<text x="{left}" y="{y + 11}">{escape(each.name)}</text>')
            if not each.values:
                continue
            middle = median_low(each.values)
            end = length if math.isinf(middle) else middle * scale
            dash = ' stroke-dasharray="4 3"' if math.isinf(middle) else ""
            out.append(
                f'<rect x="{start}" y="{y}" width="{end:.1f}" height="14" fill="{colour}" fill-opacity="0.35" '
                f'stroke="{colour}"{dash}/>'
            )
            for value in each.values:
                x = start + min(length, value * scale)
                out.append(f'<circle cx="{x:.1f}" cy="{y + 7}" r="3" fill="{colour}"/>')
            text = "not served" if math.isinf(middle) else f"{middle:.3g}" if middle < 1000 else f"{middle:.0f}"
            out.append(f'<text x="{start + length + 10}" y="{y + 11}">{text}</text>')
    path.write_text("\n".join([*out, "</svg>"]) + "\n")
