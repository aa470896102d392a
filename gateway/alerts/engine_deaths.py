"""Recording of engines' deaths as events `engine.died`, at once, and at most one a minute and engine.

Every gateway process sees the deaths, because each checks every engine. An event lists the instances that it counts,
so a death that another process has recorded is not recorded again.
"""

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from gateway.errors import Unavailable
from gateway.fleet.engines.engine import EngineRecord
from gateway.records.events.deaths import REPORTED, EngineDeathEvent, recent_deaths
from gateway.records.events.events import Events

log = logging.getLogger(__name__)

# Shortest time between two events of an engine. Deaths in between are counted in the next event, so that neither a
# crash loop nor a tenant whose requests kill engines can flood the targets of events.
PAUSE = timedelta(minutes=1)
# Shortest time between two recordings, because each reads the database.
RECORD_SECONDS = 1.0
# Deaths within this time are one if the engine's instance is unknown: a foreign server takes longer to start again.
ONE_DEATH = timedelta(seconds=20)
# Maximum deaths of an engine that wait for the database; the earliest are dropped first.
MAX_WAITING = 100


class Death(NamedTuple):
    """An engine's death that is not recorded yet. instance: the one that died, None if unknown."""

    instance: str | None
    at: datetime
    reason: str


class EngineDeaths:
    """The deaths that this process has seen and no event counts yet."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: defaultdict[str, list[Death]] = defaultdict(list)
        self._noted = asyncio.Event()
        self._recording = asyncio.Lock()

    def note(self, engine: EngineRecord, reason: str) -> None:
        """Note the death of an engine's present instance."""
        waiting = self._waiting[engine.url]
        waiting.append(Death(engine.state.instance, datetime.now(UTC), reason))
        del waiting[:-MAX_WAITING]
        self._noted.set()

    async def watch(self) -> None:
        """Record each death at once, until cancelled. `record` repeats a failed or postponed recording."""
        while True:
            await self._noted.wait()
            self._noted.clear()
            try:
                await self.record()
            except Unavailable as error:
                log.debug("deaths of engines were not recorded: %s", error)
            except Exception:
                log.exception("deaths of engines were not recorded")
            await asyncio.sleep(RECORD_SECONDS)

    async def record(self) -> None:
        """Record the deaths whose engine had no event in the last PAUSE. Raises Unavailable."""
        async with self._recording:
            if not self._waiting:
                return
            now = datetime.now(UTC)
            recorded = await recent_deaths(self._events.database, now - REPORTED)
            for url in [*self._waiting]:
                await self._record_of(url, [each for each in recorded if each.engine == url], now)

    async def _record_of(self, url: str, recorded: Sequence[EngineDeathEvent], now: datetime) -> None:
        new = [death for death in self._waiting[url] if not any(_counts(event, death) for event in recorded)]
        self._waiting[url] = [*new]
        if new and recorded and now - max(event.created_at for event in recorded) < PAUSE:
            return
        if new and not await self._add_event(url, new):
            # The first death is on record: another process was first, or the instance counted as dead long ago and
            # lived on. The next recording drops the others that an event counts.
            new = new[:1]
        # Further deaths may have been noted during the write.
        self._waiting[url] = [death for death in self._waiting[url] if death not in new]
        if not self._waiting[url]:
            del self._waiting[url]

    async def _add_event(self, url: str, deaths: Sequence[Death]) -> bool:
        """Add the event of these deaths. Return whether it is new."""
        last = deaths[-1]
        data = {
            "engine": url,
            "deaths": len(deaths),
            "reason": last.reason,
            "last_at": last.at,
            "instances": [death.instance for death in deaths if death.instance is not None],
        }
        # Two processes that record at once have the same first instance, or times close to each other, so they add one
        # event.
        mark = f"{url} {deaths[0].instance or deaths[0].at.timestamp() // ONE_DEATH.total_seconds()}"
        once = f"engine.died:{hashlib.sha256(mark.encode()).hexdigest()[:32]}"
        return await self._events.record("engine.died", data, once=once)


def _counts(event: EngineDeathEvent, death: Death) -> bool:
    """Return whether an event counts a death."""
    if death.instance is not None:
        return death.instance in event.instances
    return abs(death.at - event.last_at) < ONE_DEATH
