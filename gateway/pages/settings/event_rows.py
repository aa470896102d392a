"""Rows of events, on the page of alerts and in its CSV file."""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from gateway.alerts.messages import MONEY, title
from gateway.api.reports.files import csv_parts, send_file
from gateway.pages.widgets.tables import Column
from gateway.records.events.events import Event, Events
from wire.money import exact_money, format_money

# Events that are read and encoded at a time.
AT_ONCE = 200
EVENT_TITLES = {
    "budget.threshold": "Budget reached a threshold",
    "budget.exhausted": "Budget used up",
    "budget.soft": "Soft budget reached",
    "tenant.suspended": "Tenant suspended",
    "key.expiring": "Key expires soon",
    "engine.died": "Engine died",
    "engine.down": "Engine down",
    "engine.up": "Engine up again",
    "engine.mismatch": "Engine answered with another adapter",
    "adapter.rejected": "Adapter rejected",
    "request.quarantined": "Request in quarantine",
    "adapter.quarantined": "Adapter in quarantine",
    "tenant.quarantined": "Tenant in quarantine",
    "keys.guessed": "Wrong keys in a burst",
}
TONES = {
    "budget.threshold": "warn",
    "budget.exhausted": "bad",
    "budget.soft": "warn",
    "tenant.suspended": "info",
    "key.expiring": "warn",
    "engine.died": "bad",
    "engine.down": "bad",
    "engine.up": "good",
    "engine.mismatch": "bad",
    "adapter.rejected": "warn",
    "request.quarantined": "warn",
    "adapter.quarantined": "warn",
    "tenant.quarantined": "bad",
    "keys.guessed": "bad",
}
STATE_TONES = {"delivered": "good", "pending": "info", "failed": "bad"}
EVENT_COLUMNS = (
    Column("at", "Time", sortable=False),
    Column("type", "Event", sortable=False),
    Column("tenant", "Tenant", sortable=False),
    Column("details", "Details", sortable=False),
    Column("deliveries", "Delivered to", sortable=False),
)
FIELDS = ("id", "created_at", "type", "tenant", "title", "data", "deliveries")


class EventRow(NamedTuple):
    """Event as the page shows it. details: (field, text). deliveries: (webhook, state, tone)."""

    id: str
    at: datetime
    type: str
    tone: str
    tenant: str | None
    title: str
    details: Sequence[tuple[str, str]]
    deliveries: Sequence[tuple[str, str, str]]


def event_row(event: Event, currency: str) -> EventRow:
    return EventRow(
        event.id,
        event.created_at,
        event.type,
        TONES.get(event.type, "quiet"),
        event.tenant,
        _title(event),
        [(name, _detail(name, value, currency)) for name, value in event.data.items() if value is not None],
        [(name, state, STATE_TONES.get(state, "quiet")) for name, state in event.deliveries.items()],
    )


async def export_events(request: web.Request, events: Events, which: Mapping[str, Any]) -> web.StreamResponse:
    """Stream all events of a filter as CSV, from its `after` on. Raises BadRequest, Unavailable before it begins."""
    first = await events.list(**which, limit=AT_ONCE)
    rows = (map(_cells, page) async for page in _pages(events, which, first))
    return await send_file(request, "events.csv", "text/csv", csv_parts(FIELDS, rows))


async def _pages(
    events: Events, which: Mapping[str, Any], page: tuple[Sequence[Event], bool]
) -> AsyncIterator[Sequence[Event]]:
    while True:
        found, has_more = page
        yield found
        if not has_more:
            return
        page = await events.list(**{**which, "after": found[-1].id}, limit=AT_ONCE)


def _cells(event: Event) -> tuple[Any, ...]:
    data = {name: exact_money(value) if name in MONEY else value for name, value in event.data.items()}
    deliveries = " ".join(f"{name}:{state}" for name, state in event.deliveries.items())
    encoded = msgspec.json.encode(data).decode()
    return event.id, event.created_at, event.type, event.tenant, _title(event), encoded, deliveries


def _title(event: Event) -> str:
    """Return the event in one line. An event of a newer release has its type only."""
    try:
        return title(event.type, event.tenant, event.data)
    except (KeyError, TypeError):
        return event.type


def _detail(name: str, value: Any, currency: str) -> str:
    if name in MONEY and isinstance(value, int):
        return f"{format_money(value)} {currency}"
    if name == "threshold" and isinstance(value, int | float):
        return f"{100 * value:g} %"
    return str(value)
