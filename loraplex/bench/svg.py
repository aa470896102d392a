"""Line and point plots as inline SVG. Colours come from the page's CSS variables `--series-0` and on."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40
COLOURS = 8

Points = Sequence[tuple[float, float]]


def plot(lines: Mapping[str, Points], x_title: str, y_title: str, *, dots: bool = False) -> str:
    """Return a figure with a legend: a line for each name, or with `dots` a point for each pair."""
    every = [point for points in lines.values() for point in points]
    if not every:
        return "<p>No data.</p>"
    x_ticks, y_ticks = ticks(max(x for x, _ in every)), ticks(max(y for _, y in every))
    x_scale, y_scale = (WIDTH - LEFT - RIGHT) / x_ticks[-1], (HEIGHT - TOP - BOTTOM) / y_ticks[-1]

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + point[0] * x_scale, HEIGHT - BOTTOM - point[1] * y_scale

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_title)} by {escape(x_title)}">']
    parts += _axes(x_ticks, y_ticks, x_scale, y_scale)
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_title)}</text>')
    for number, points in enumerate(lines.values()):
        places = [place(point) for point in points]
        colour = f"var(--series-{number % COLOURS})"
        if dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}" />' for x, y in places]
        elif places:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" />')
    return "".join(
        [f"<figure><figcaption>{escape(y_title)}{_legend(list(lines))}</figcaption>", *parts, "</svg></figure>"]
    )


def ticks(most: float) -> list[float]:
    """Return 0 and up to six round numbers, the last of which is at least `most`."""
    if not 0 < most < math.inf:
        return [0.0, 1.0]
    size = 10 ** math.floor(math.log10(most / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * 5 >= most * (1 - 1e-9))
    return [step * number for number in range(max(1, math.ceil(most / step - 1e-9)) + 1)]


def _axes(x_ticks: Sequence[float], y_ticks: Sequence[float], x_scale: float, y_scale: float) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for value in y_ticks:
        y = bottom - value * y_scale
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" />')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        x = LEFT + value * x_scale
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    return parts


def _legend(names: Sequence[str]) -> str:
    keys = (
        f'<span class="key"><i style="background:var(--series-{number % COLOURS})"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return "".join(keys)
