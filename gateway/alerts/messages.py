"""Texts of events, for e-mail and the command line."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from wire.money import format_money

# Keys of event data that hold micro-units.
MONEY = ("budget", "spent")
TITLES = {
    "budget.threshold": "{tenant} has spent {percent} % of its budget",
    "budget.exhausted": "{tenant} has used up its budget",
    "budget.soft": "{tenant} has reached its soft budget",
    "tenant.suspended": "{tenant} is suspended",
    "key.expiring": "An API key of {tenant} expires soon",
    "engine.died": "The engine {engine} died{times}",
    "engine.down": "The engine {engine} is down",
    "engine.up": "The engine {engine} is up again",
    "engine.mismatch": "The engine {engine} answered with another adapter than the request's, and gets no requests",
    "adapter.rejected": "The adapter {adapter} of {tenant} was rejected",
    "request.quarantined": "Engines died with a request of {tenant}, which is refused for a time",
    "adapter.quarantined": "Engines died with an adapter of {tenant}, which is refused for a time",
    "tenant.quarantined": "Engines died with several requests of {tenant}, and all are refused for a time",
    "keys.guessed": "Clients try API keys",
    "test": "Test of the webhook {webhook}",
}


def title(kind: str, tenant: str | None, data: Mapping[str, Any]) -> str:
    """Return one line about an event, its type if a later release recorded it. Control characters are left out."""
    values = {**data, "tenant": tenant or "the operators", "percent": round(100 * data.get("threshold", 1))}
    values["times"] = f" {deaths} times" if (deaths := data.get("deaths", 1)) != 1 else ""
    text = TITLES.get(kind, kind).format_map(values)
    return "".join(character for character in text if character.isprintable())[:200]


def body(event_id: str, kind: str, tenant: str | None, data: Mapping[str, Any], at: datetime) -> bytes:
    """Return the JSON of a webhook."""
    shown = {"tenant": tenant, **data} if tenant is not None else dict(data)
    return msgspec.json.encode({"id": event_id, "type": kind, "timestamp": at, "data": shown})


def text(kind: str, tenant: str | None, data: Mapping[str, Any], at: datetime) -> str:
    """Return the text of an e-mail."""
    lines = [title(kind, tenant, data), "", f"event: {kind}", f"time: {at:%Y-%m-%d %H:%M:%S} UTC"]
    for name, value in data.items():
        shown = format_money(value) if name in MONEY else value
        lines.append(f"{name}: {shown}")
    return "\n".join(lines) + "\n"
