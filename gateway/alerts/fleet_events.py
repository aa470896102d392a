"""Events of the fleet that the processes which saw them record: deaths, mismatched receipts, and quarantines."""

import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.alerts.engine_deaths import EngineDeaths
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.failures.deaths import QuarantinePeriod
from gateway.fleet.failures.quarantine import Quarantine
from gateway.metrics import Metrics
from gateway.records.bases.base import suspect_digest
from gateway.records.events.events import Events
from gateway.records.events.types import EventType
from gateway.records.tenants.tenants import Tenants
from wire.digests import digest_name

QUARANTINED: dict[str, EventType] = {
    "request": "request.quarantined",
    "adapter": "adapter.quarantined",
    "tenant": "tenant.quarantined",
}
# Tenants whose names are read at a time.
NAMES_AT_ONCE = 500


class FleetEvents:
    """Recorder of these events. Those that the database did not take are recorded at the next look.

    deaths: the engines' deaths, which are also recorded between the looks.
    """

    def __init__(self, events: Events, tenants: Tenants, metrics: Metrics, quarantine: Quarantine) -> None:
        self.deaths = EngineDeaths(events)
        self._events = events
        self._tenants = tenants
        self._metrics = metrics
        self._quarantine = quarantine
        # Engines' URLs with the instances that answered with another adapter than the request's.
        self._mismatched: set[tuple[str, str]] = set()
        self._begun: list[QuarantinePeriod] = []

    def note_mismatch(self, engine: EngineRecord, instance: str | None) -> None:
        """Count an instance's answer with another adapter than the request's, and record it at the next look."""
        self._metrics.adapter_mismatch(engine.url)
        self._mismatched.add((engine.url, str(instance)))

    async def look(self) -> None:
        """Record the events since the last look. Raises Unavailable."""
        await self.deaths.record()
        for each in sorted(self._mismatched):
            url, instance = each
            data = {"engine": url, "instance": instance}
            await self._events.record("engine.mismatch", data, once=_once("engine.mismatch", url, instance))
            self._mismatched.discard(each)
        self._begun += self._quarantine.take_begun()
        while self._begun:
            await self._record(self._begun[:NAMES_AT_ONCE])
            del self._begun[:NAMES_AT_ONCE]

    async def _record(self, begun: Sequence[QuarantinePeriod]) -> None:
        names = await self._tenants.names({period.suspect.tenant_id for period in begun})
        for period in begun:
            kind, tenant_id, mark = period.suspect
            if tenant_id not in names:
                # The tenant is deleted.
                continue
            began, ends = (_moment(self._quarantine.age, at) for at in (period.began, period.ends))
            data: dict[str, Any] = {"deaths": len(period.deaths), "ends_at": ends}
            if kind == "adapter":
                data["adapter"] = digest_name(suspect_digest(mark))
            # The minute tells two quarantines of a suspect apart. Two processes that announce the same one measure its
            # beginning with an error of less than a second, so their minutes rarely differ.
            once = _once(QUARANTINED[kind], tenant_id, mark, f"{began:%Y-%m-%dT%H:%M}")
            await self._events.record(QUARANTINED[kind], data, once=once, tenant_id=tenant_id, tenant=names[tenant_id])


def _moment(age: Callable[[float], float], at: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=age(at))


def _once(kind: str, *parts: str) -> str:
    return f"{kind}:{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}"
