"""Detection of events: thresholds of budgets, expiring keys, engines, quarantines, bursts of wrong keys.

A single gateway process at a time checks the state that all processes share. Each process records by itself the events
that only it can see. The column `once` of the table makes each event one row in any case.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from gateway.alerts.budgets import Budgets, ThresholdCrossing
from gateway.alerts.fleet_events import FleetEvents
from gateway.errors import Unavailable
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.health import Health
from gateway.metrics import Metrics
from gateway.process.background import running
from gateway.records.events.events import Events
from gateway.records.keys.expiring import expiring_keys
from gateway.records.maintenance.leadership import Leadership

log = logging.getLogger(__name__)

# Interval of the checks. Expiring keys are checked less often, because that reads all keys.
LOOK_SECONDS, KEYS_SECONDS = 15.0, 300.0
LAST_LOOK_SECONDS = 2.0
EXPIRES_WITHIN = timedelta(days=7)
# Seconds until an engine is reported down: after it was up, and if it was never up, because it may be loading its
# model.
DOWN_SECONDS, NEVER_UP_SECONDS = 30.0, 300.0
# Number of wrong keys per minute, in one process, that makes a burst. There is one event per BURST_MINUTES.
WRONG_KEYS = 60
BURST_MINUTES = 10


class Watch:
    """Watch of one process. engines: returns the engines as this process sees them. fleet: events that it saw."""

    def __init__(
        self,
        events: Events,
        budgets: Budgets,
        leadership: Leadership,
        metrics: Metrics,
        engines: Callable[[], Sequence[EngineRecord]],
        fleet: FleetEvents,
    ) -> None:
        self._events = events
        self._budgets = budgets
        self._leadership = leadership
        self._metrics = metrics
        self._engines = engines
        self._fleet = fleet
        # (time.monotonic(), number of wrong keys so far) at each look of the last minute.
        self._wrong_keys: list[tuple[float, int]] = []
        self._leads = False
        # Time (monotonic) of the last look at keys.
        self._keys_at = -math.inf
        self._was_up: set[str] = set()
        # Type and id of the newest event of each engine.
        self._reported: dict[str, tuple[str, str]] = {}

    async def running(self, _: object) -> AsyncIterator[None]:
        """Watch beside an application."""
        async with running(self.run()), running(self._fleet.deaths.watch()):
            yield
        # Only this process has seen these events.
        try:
            async with asyncio.timeout(LAST_LOOK_SECONDS):
                await self._fleet.look()
        except (TimeoutError, Unavailable) as error:
            log.warning("the last events of the fleet were not recorded: %s", type(error).__name__)
        await self._leadership.leave()

    async def run(self) -> None:
        """Look again and again, until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except Unavailable as error:
                # `Database` logs the outage.
                log.debug("events were not looked for: %s", error)
            except Exception:
                log.exception("events were not looked for")

    async def look(self) -> None:
        """Record the events since the last look. Raises Unavailable."""
        now = datetime.now(UTC)
        self._was_up |= {engine.url for engine in self._engines() if engine.is_up}
        await self._look_at_wrong_keys(now)
        await self._fleet.look()
        await self._look_at_refused(now)
        led, self._leads = self._leads, await self._leadership.take()
        if not self._leads:
            self._budgets.forget()
            self._metrics.budgets_used({})
            return
        if not led:
            self._keys_at = -math.inf
            self._leads = False  # until the next line succeeds
            newest = await self._events.newest(("engine.down", "engine.up"))
            self._leads = True
            self._reported = {url: (event.type, event.id) for url, event in newest.items()}
        # Budgets last: the database may take long for the sums of all tenants, or not finish them.
        errors: list[Unavailable] = []
        for look in (
            self._look_at_engines,
            partial(self._look_at_keys, now),
            partial(self._look_at_budgets, now),
        ):
            try:
                await look()
            except Unavailable as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def _look_at_budgets(self, now: datetime) -> None:
        async for reached in self._budgets.reached(now):
            await self._report_budgets(reached)
        self._metrics.budgets_used(self._budgets.used)

    async def _look_at_refused(self, now: datetime) -> None:
        """Report used-up budgets of tenants that this process has refused."""
        if refused := self._metrics.take_over_budget():
            await self._report_budgets(await self._budgets.exhausted(refused, now))

    async def _report_budgets(self, reached: Sequence[ThresholdCrossing]) -> None:
        """Record reached thresholds, once per period and budget; a changed budget counts as another one."""
        new = await self._events.missing([each.once for each in reached])
        for each in reached:
            if each.once in new:
                await self._events.record(
                    each.type,
                    each.data,
                    once=each.once,
                    tenant_id=each.tenant.id,
                    tenant=each.tenant.name,
                )

    async def _look_at_keys(self, now: datetime) -> None:
        if time.monotonic() - self._keys_at < KEYS_SECONDS:
            return
        found = await expiring_keys(self._events.database, now, now + EXPIRES_WITHIN)
        keys = {f"key.expiring:{key.id}:{key.expires_at.isoformat()}": key for key in found}
        new = await self._events.missing(list(keys))
        for once, key in keys.items():
            if once in new:
                data = {"key": key.id, "label": key.label, "expires_at": key.expires_at}
                await self._events.record("key.expiring", data, once=once, tenant_id=key.tenant_id, tenant=key.tenant)
        self._keys_at = time.monotonic()

    async def _look_at_engines(self) -> None:
        for engine in self._engines():
            was_down, last = self._last(engine.url)
            if self._is_down(engine) and not was_down:
                data = {"engine": engine.url, "reason": engine.fault}
                await self._report_engine("engine.down", engine.url, data, last)
            elif engine.is_up and was_down:
                await self._report_engine("engine.up", engine.url, {"engine": engine.url}, last)

    def _last(self, url: str) -> tuple[bool, str]:
        """Return (whether an engine's newest event is `engine.down`, the event's id)."""
        kind, event_id = self._reported.get(url, ("engine.up", ""))
        return kind == "engine.down", event_id

    async def _report_engine(self, kind: Any, url: str, data: dict[str, Any], last: str) -> None:
        # `once` contains the event before it, so that two gateways that lead at once record one event.
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        await self._events.record(kind, data, once=f"{kind}:{name}:{last}")
        newest = (await self._events.newest(("engine.down", "engine.up")))[url]
        self._reported[url] = (newest.type, newest.id)

    def _is_down(self, engine: EngineRecord) -> bool:
        condition = engine.condition
        if condition.health in (Health.UP, Health.DRAINING, Health.ASLEEP):
            return False
        patience = DOWN_SECONDS if engine.url in self._was_up else NEVER_UP_SECONDS
        return time.monotonic() - condition.since >= patience

    async def _look_at_wrong_keys(self, now: datetime) -> None:
        at, total = time.monotonic(), self._metrics.wrong_keys
        self._wrong_keys = [(then, number) for then, number in self._wrong_keys if at - then <= 60]
        self._wrong_keys.append((at, total))
        recent = total - self._wrong_keys[0][1]
        if recent >= WRONG_KEYS:
            window = now.replace(minute=now.minute // BURST_MINUTES * BURST_MINUTES, second=0, microsecond=0)
            data = {"wrong_keys": recent, "seconds": 60}
            await self._events.record("keys.guessed", data, once=f"keys.guessed:{window:%Y-%m-%dT%H:%M}")
