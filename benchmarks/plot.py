"""A line chart as an SVG file, on logarithmic axes, without a plotting library."""

import math
from pathlib import Path

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
