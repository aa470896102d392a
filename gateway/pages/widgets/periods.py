"""Period of a page, from `?period=`, from `?since=` and `?until=`, or around the time `?at=`."""

import re
from datetime import UTC, datetime, time, timedelta
from typing import NamedTuple

from aiohttp import web

from gateway.api.requests.fields import parse_period, read_moment
from gateway.errors import BadRequest
from gateway.pages.frame.frame import link

# Lengths of the periods that end now, by their names in the URL.
LENGTHS = {
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "24h": timedelta(days=1),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}
MONTH, LAST_MONTH = "month", "last_month"
TITLES = {
    "15m": "15 min",
    "1h": "1 h",
    "24h": "24 h",
    "7d": "7 d",
    "30d": "30 d",
    MONTH: "This month",
    LAST_MONTH: "Last month",
}
QUERY = ("period", "since", "until", "at")
# Time shown before and after `at`.
AROUND = timedelta(minutes=10)
MAX_DAYS = 3660
# Named periods above this length begin with a whole day in reports of usage.
DAILY = timedelta(days=7)


class PagePeriod(NamedTuple):
    """Period of a page. name: a key of TITLES, "" for a period with dates. until: exclusive; now for a period that ends
    now.
    """

    name: str
    since: datetime
    until: datetime

    @property
    def before(self) -> datetime:
        """Return the start of the period before."""
        if self.name in (MONTH, LAST_MONTH):
            return month_start(self.since - timedelta(days=1))
        return self.since - (self.until - self.since)

    @property
    def before_until(self) -> datetime:
        """Return the end of the period before. It is cut for the present month, so that both are equally long."""
        return min(self.since, self.before + (self.until - self.since)) if self.name == MONTH else self.since

    @property
    def is_open(self) -> bool:
        """Return whether the period ends now. Sums of the present hour and day reach up to now, so it needs no end."""
        return self.name not in ("", LAST_MONTH)

    @property
    def fields(self) -> dict[str, str]:
        """Return both ends in the format of HTML's `datetime-local` fields."""
        return {"since": as_field(self.since), "until": as_field(self.until)}


def read_period(request: web.Request, default: str, now: datetime) -> PagePeriod:
    """Return the period of the query. default: a key of TITLES. Raises BadRequest."""
    if request.query.get("at"):
        at = read_time(request, now)
        return PagePeriod("", at - AROUND, at + AROUND)
    since, until = parse_period(request.query)
    if since is not None or until is not None:
        until = until or now
        since = since or until - timedelta(days=1)
        if since >= until:
            raise BadRequest("since: expected a time before 'until'.", param="since")
        if until - since > timedelta(days=MAX_DAYS):
            raise BadRequest(f"since: expected a period of at most {MAX_DAYS} days.", param="since")
        return PagePeriod("", since, until)
    name = request.query.get("period") or default
    if name in LENGTHS:
        return PagePeriod(name, now - LENGTHS[name], now)
    if name == MONTH:
        return PagePeriod(name, month_start(now), now)
    if name == LAST_MONTH:
        end = month_start(now)
        return PagePeriod(name, month_start(end - timedelta(days=1)), end)
    raise BadRequest(f"period: expected one of {', '.join(TITLES)}.", param="period")


def whole(period: PagePeriod, *, by_day: bool = False) -> PagePeriod:
    """Return a named period, extended to the start of its first hour, or day if it is long, so that sums suffice.

    by_day: extend it to the start of its first day, for usage that has sums by day only.
    """
    if period.name not in LENGTHS:
        return period
    return period._replace(since=_floor(period.since, 0 if by_day or LENGTHS[period.name] > DAILY else None))


def bounds_before(period: PagePeriod) -> tuple[datetime, datetime]:
    """Return both ends of the period before, in whole hours if the period ends now."""
    if period.is_open:
        return _floor(period.before), _floor(period.before_until)
    return period.before, period.before_until


def _floor(moment: datetime, hour: int | None = None) -> datetime:
    """Return the start of the hour in UTC. hour: another hour of its day."""
    start = moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    return start if hour is None else start.replace(hour=hour)


def read_time(request: web.Request, now: datetime) -> datetime:
    """Return `?at=`: a date with a time, or a time of the last 24 hours as `HH:MM`. Raises BadRequest."""
    given = request.query["at"].strip()
    if match := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", given):
        at = now.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
        return at if at <= now else at - timedelta(days=1)
    found = read_moment(request, "at")
    assert found is not None
    return found


def segments_of(request: web.Request, period: PagePeriod, names: tuple[str, ...]) -> list[tuple[str, str, bool]]:
    """Return links to the periods, for the macro `segments`."""
    without = {"since": None, "until": None, "at": None, "after": None}
    return [(TITLES[name], link(request, period=name, **without), name == period.name) for name in names]


def range_text(since: datetime, until: datetime) -> str:
    """Return a period in words: whole days as their first and last date, others with times."""
    since, until = since.astimezone(UTC), until.astimezone(UTC)
    if since.time() == until.time() == time() and since < until:
        last = until - timedelta(days=1)
        return _day(since) if since == last else f"{_day(since)} to {_day(last)}"
    if since.date() == until.date():
        return f"{_day(since)}, {since:%H:%M} to {until:%H:%M} UTC"
    return f"{_day(since)} {since:%H:%M} to {_day(until)} {until:%H:%M} UTC"


def _day(moment: datetime) -> str:
    return f"{moment.day} {moment:%b %Y}"


def month_start(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def as_field(moment: datetime | None) -> str:
    """Return a UTC time in the format of HTML's `datetime-local` fields."""
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
