"""Periods of reports of activity and refusals, in whole minutes or hours, and the sums that cover them."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from gateway.errors import BadRequest

MINUTE, HOUR, DAY = 60, 3600, 86400
STEPS = (60, 300, 900, 3600, 86400)
MAX_POINTS = 1500
# Default step by the longest period that has it.
DEFAULT_STEPS = ((3 * HOUR, 60), (36 * HOUR, 900), (15 * DAY, 3600))
# Minute sums are kept for longer than the setting, so that a period of that length and the one before have them.
SPARE = timedelta(hours=2)
Segments = list[tuple[int, int, int]]
"""Level (length of its periods in seconds), start and end, in Unix seconds."""


class Period(msgspec.Struct, frozen=True):
    """Period of a report, in Unix seconds.

    end: the end for queries, which may be after `until`. before: the start of the period before.
    minutes_from: the earliest time with minute sums.
    """

    since: int
    until: int
    end: int
    before: int
    step: int
    minutes_from: int

    @property
    def starts(self) -> list[int]:
        return list(range(self.since // self.step * self.step, self.until, self.step))


def whole_period(
    since: datetime, until: datetime | None, step: int | None, minutes_kept: timedelta, now: datetime
) -> Period:
    """Return the period in whole minutes or hours. Raises BadRequest."""
    present = int(now.timestamp())
    minutes_from = present - int((minutes_kept + SPARE / 2).total_seconds())
    last = min(present, int((until or now).timestamp()))
    start = int(since.timestamp())
    if start >= last:
        raise BadRequest("since: expected a time before 'until' and before now.", param="since")
    start = _floor(start, minutes_from)
    is_open = last >= present - MINUTE
    end = -(-last // MINUTE) * MINUTE if last >= minutes_from else -(-last // HOUR) * HOUR
    chosen = step or _step(end - start, start >= minutes_from)
    if (end - start) // chosen > MAX_POINTS:
        raise BadRequest(f"step: expected at most {MAX_POINTS} steps in the period.", param="step")
    if chosen < HOUR and start < minutes_from:
        raise BadRequest("step: expected at least 3600, because older minutes are not kept.", param="step")
    before = _floor(start - (end - start), minutes_from)
    # The sums of the present hour and day reach up to now, so a period that ends now includes them whole.
    query_end = -(-end // DAY) * DAY if is_open else end
    return Period(start, end, query_end, before, chosen, minutes_from)


def _step(seconds: int, has_minutes: bool) -> int:
    found = next((step for most, step in DEFAULT_STEPS if seconds <= most), DAY)
    return found if has_minutes or found >= HOUR else HOUR


def _floor(moment: int, minutes_from: int) -> int:
    unit = MINUTE if moment >= minutes_from else HOUR
    return moment // unit * unit


def cover(start: int, end: int, levels: Sequence[int] = (DAY, HOUR, MINUTE)) -> Segments:
    """Return the segments of the longest periods that cover `[start, end)`. levels: the lengths, longest first."""
    for i, level in enumerate(levels):
        first, last = -(-start // level) * level, end // level * level
        if first < last:
            shorter = levels[i + 1 :]
            return [*cover(start, first, shorter), (level, first, last), *cover(last, end, shorter)]
    return []


def moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
