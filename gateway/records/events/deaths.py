"""Events `engine.died` of the recent past."""

from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
from sqlalchemy import select

from gateway.records.events.tables import events
from gateway.records.sql.database import Database

# Time for which an engine's deaths are reported as something that needs attention.
REPORTED = timedelta(hours=1)
MAX_READ = 5_000


class EngineDeathEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event of an engine's deaths. last_at: time of the last one. instances: those that died, as far as known."""

    engine: str
    deaths: int
    last_at: datetime
    instances: list[str] = []
    created_at: datetime


class EngineDeaths(NamedTuple):
    """Number of an engine's deaths in the last REPORTED, and the time of the last one."""

    engine: str
    deaths: int
    last_at: datetime


async def recent_deaths(database: Database, since: datetime) -> list[EngineDeathEvent]:
    """Return the events since a time, the newest first, at most MAX_READ. Raises Unavailable."""
    query = (
        select(events.c.data, events.c.created_at)
        .where(events.c.type == "engine.died", events.c.tenant_id.is_(None), events.c.created_at > since)
        .order_by(events.c.created_at.desc())
        .limit(MAX_READ)
    )
    async with database.read() as connection:
        rows = (await connection.execute(query)).all()
    return [
        msgspec.convert(msgspec.json.decode(row.data) | {"created_at": row.created_at}, EngineDeathEvent)
        for row in rows
    ]


async def engines_that_died(database: Database, since: datetime) -> list[EngineDeaths]:
    """Return the engines that died since a time, the last one first. Raises Unavailable."""
    found: dict[str, EngineDeaths] = {}
    for event in await recent_deaths(database, since):
        deaths, last_at = event.deaths, event.last_at
        if (known := found.get(event.engine)) is not None:
            deaths, last_at = deaths + known.deaths, max(last_at, known.last_at)
        found[event.engine] = EngineDeaths(event.engine, deaths, last_at)
    return sorted(found.values(), key=lambda each: each.last_at, reverse=True)
