"""Periods of pages with charts: `?period=24h`, or `?since=` and `?until=` for any other."""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from aiohttp import web

from gateway.errors import BadRequest

PERIODS = {
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}
TITLES = {"1h": "1 h", "24h": "24 h", "7d": "7 d", "30d": "30 d"}
LONGEST = timedelta(days=400)


class Shown(NamedTuple):
    """Period of a page. name: of PERIODS, or "custom". until: None for now."""

    name: str
    since: datetime
    until: datetime | None

    @property
    def end(self) -> datetime:
        return self.until or datetime.now(UTC)

    @property
    def seconds(self) -> float:
        return max(1.0, (self.end - self.since).total_seconds())


def read_period(request: web.Request, default: str = "24h") -> Shown:
    """Return the request's period. Raises BadRequest, which names the parameter."""
    now = datetime.now(UTC)
    if "since" in request.query:
        since, until = _moment(request, "since"), None
        if request.query.get("until"):
            until = _moment(request, "until")
        if since >= (until or now) or (until or now) - since > LONGEST:
            raise BadRequest("since: expected a moment before 'until', and at most 400 days before it.", param="since")
        return Shown("custom", since, until)
    name = request.query.get("period", default)
    if name not in PERIODS:
        raise BadRequest(f"period: expected one of {', '.join(PERIODS)}.", param="period")
    return Shown(name, now - PERIODS[name], None)


def _moment(request: web.Request, name: str) -> datetime:
    try:
        moment = datetime.fromisoformat(request.query[name])
    except ValueError as error:
        raise BadRequest(f"{name}: expected a time such as 2026-11-23T10:40Z.", param=name) from error
    # A form's field has no zone.
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
