"""Filters of the templates: money, numbers, times, durations and bytes as a person reads them.

Each shortened form keeps the exact value in its `title`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from markupsafe import Markup, escape

from gateway.api.requests.fields import REVERSING
from wire.money import MICRO_UNITS, format_money

NOTHING = Markup('<span class="none">–</span>')
EXACT = "%Y-%m-%d %H:%M:%S UTC"
# Decimal prefixes, and the largest number that is written out.
PREFIXES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
WRITTEN_OUT = 9_999
# Below this value, two decimals would show one significant digit or none.
SMALL = 0.1
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Characters that reverse the text around them, as visible escapes. Names that older releases stored may have them.
REVERSING_SHOWN = {ord(character): f"\\u{ord(character):04x}" for character in REVERSING}
# Seconds of each unit, the largest first, and its name.
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))

# Start tag of a table's cell, and the number of columns that it spans.
CELL, SPAN = re.compile(r"<(td|th)\b([^>]*)>"), re.compile(r'colspan="(\d+)"')


class Titled(Protocol):
    """Column of a table, as far as `labelled` reads it."""

    @property
    def title(self) -> str: ...


def inert(value: Any) -> Any:
    """Return a plain text with visible escapes in place of characters that reverse text, and other values unchanged.

    The templates apply it to every value that they show, except to markup.
    """
    return value.translate(REVERSING_SHOWN) if type(value) is str and not value.isascii() else value


def typed(value: object) -> Markup:
    """Return the value of a form's field, which `inert` must not change: the form sends it back."""
    return escape(value)


def labelled(row: Markup, columns: Sequence[Titled]) -> Markup:
    """Return the cells of a row, each with its column's title as `data-label`, which a narrow window shows above it."""
    index = 0

    def label(cell: re.Match[str]) -> str:
        nonlocal index
        kind, attributes = cell.groups()
        span = SPAN.search(attributes)
        title = columns[index].title if index < len(columns) else ""
        index += 1 if span is None else int(span[1])
        if kind == "th" or span is not None or not title or "data-label=" in attributes:
            return cell[0]
        return f'<td{attributes} data-label="{escape(title)}">'

    # A cell's texts are escaped, so that no text of a row is a tag.
    return Markup(CELL.sub(label, row))


def number(value: float | None) -> str | Markup:
    """Return the number with its thousands grouped: `1,234,567`. A small fraction keeps two digits: `0.0017`."""
    if value is None:
        return NOTHING
    if 0 < abs(value) < SMALL:
        return f"{float(f'{value:.2g}'):.9f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}".rstrip("0").rstrip(".")


def compact(value: float | None) -> str | Markup:
    """Return the number with three digits and a prefix: `12.3k`. The title has all digits."""
    if value is None:
        return NOTHING
    if abs(value) <= WRITTEN_OUT:
        return number(value if isinstance(value, int) else _three_digits(value))
    return Markup('<span title="{}">{}</span>').format(number(round(value)), short(value))


def short(value: float) -> str:
    """Return the number as plain text with three digits and a prefix."""
    for size, prefix in PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}" if abs(value) < 999.5 * size else f"{value / size:,.0f}{prefix}"
    return f"{_three_digits(value):g}"


def money(micro_units: float | None, currency: str) -> Markup:
    """Return an amount with its currency: two decimals from 1 on, two significant digits below. The title is exact."""
    if micro_units is None:
        return NOTHING
    exact = format_money(round(micro_units))
    units = micro_units / MICRO_UNITS
    if micro_units == 0 or abs(units) >= 0.995:
        shown = f"{units:,.2f}"
    else:
        shown = f"{units:.{min(6, max(2, 1 - math.floor(math.log10(abs(units)))))}f}"
    html = '<span class="money" title="{} {}">{} <span class="unit">{}</span></span>'
    return Markup(html).format(exact, currency, shown, currency)


def percent(ratio: float | None) -> str | Markup:
    """Return a ratio as per cent, with a decimal place below ten per cent."""
    if ratio is None:
        return NOTHING
    shown = 100 * ratio
    if shown and abs(shown) < 0.1:
        return "< 0.1 %"
    return f"{shown:.1f} %" if abs(shown) < 10 and shown != round(shown) else f"{shown:.0f} %"


def duration(seconds: float | None) -> str | Markup:
    """Return a duration in its two largest units: `12 ms`, `1.24 s`, `3 min 5 s`, `2 d 4 h`."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{_three_digits(seconds):g} s"
    left = round(seconds)
    shown: list[str] = []
    for size, unit in UNITS:
        amount, left = divmod(left, size)
        if amount or shown:
            shown.append(f"{amount} {unit}" if amount else "")
        if len(shown) == 2:
            break
    return " ".join(part for part in shown if part)


def milliseconds(value: float | None) -> str | Markup:
    return NOTHING if value is None else duration(value / 1000)


def size(num_bytes: float | None) -> str | Markup:
    """Return a number of bytes with a binary unit; the title has all digits."""
    if num_bytes is None:
        return NOTHING
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(BINARY) - 1:
        value, unit = value / 1024, unit + 1
    shown = f"{_three_digits(value):g} {BINARY[unit]}"
    return Markup('<span title="{} bytes">{}</span>').format(number(int(num_bytes)), shown)


def moment(at: datetime | None, now: datetime | None = None) -> Markup:
    """Return a time relative to now, with the exact time in its title: `3 min ago`, `in 2 d`."""
    if at is None:
        return NOTHING
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    html = '<time datetime="{}" title="{}" data-relative>{}</time>'
    return Markup(html).format(at.isoformat(), at.strftime(EXACT), relative(at, now or datetime.now(UTC)))


def in_hour(at: datetime | None, now: datetime) -> Markup:
    """Return the same for the beginning of an hour in which something happened, which may have been later in it."""
    if at is None or now - at >= timedelta(hours=1):
        return moment(at, now)
    return Markup('<time datetime="{}">less than 1 h ago</time>').format(at.isoformat())


def relative(at: datetime, now: datetime) -> str:
    """Return the distance from now in its largest unit; `static/app.js` repeats this rule."""
    seconds = (now - at).total_seconds()
    distance = abs(seconds)
    if distance < 1:
        return "now"
    length, unit = next((length, unit) for length, unit in UNITS if distance >= length)
    shown = f"{int(distance / length)} {unit}"
    return f"{shown} ago" if seconds > 0 else f"in {shown}"


def exact(at: datetime | None) -> Markup:
    """Return the exact time in UTC, as an element."""
    if at is None:
        return NOTHING
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), at.strftime(EXACT))


def clock(at: datetime | None) -> Markup:
    """Return the time of day in UTC; the title has the date too."""
    if at is None:
        return NOTHING
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        at.isoformat(), at.strftime(EXACT), at.strftime("%H:%M:%S")
    )


def stamp(at: datetime, now: datetime) -> Markup:
    """Return the time of day in UTC, with the date before it unless it is today's. The title is exact."""
    at, now = at.astimezone(UTC), now.astimezone(UTC)
    shown = at.strftime("%H:%M:%S" if at.date() == now.date() else f"{at.day} %b %H:%M:%S")
    if at.year != now.year:
        shown = at.strftime("%Y-%m-%d %H:%M:%S")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(at.isoformat(), at.strftime(EXACT), shown)


def filters(currency: str) -> Mapping[str, Callable[..., Any]]:
    """Return the filters by name. currency: the name of the deployment's unit of money, such as `USD`."""
    return {
        "number": number,
        "compact": compact,
        "money": lambda micro_units: money(micro_units, currency),
        "percent": percent,
        "duration": duration,
        "milliseconds": milliseconds,
        "size": size,
        "moment": moment,
        "in_hour": in_hour,
        "exact": exact,
        "clock": clock,
        "stamp": stamp,
        "typed": typed,
        "labelled": labelled,
    }


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}") if abs(value) < 1000 else round(value)
