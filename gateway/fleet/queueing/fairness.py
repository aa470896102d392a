"""Shares of the tenants in the service that this gateway process passed on: the last minute and the last hour, in
memory. Bounded.

Service is measured in cost units, as the queue counts it. A tenant's fair share of a sample, its due, is its weight
divided by the total weight of the tenants with requests in the sample. A tenant that requests less than its due also
gets less, so only a tenant that waits and stays below its due is treated unfairly.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.queueing.base_queues import BaseQueues
from gateway.fleet.queueing.queue import TenantPlaces
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.waits import EngineQueues, Waits
from wire.bounded_dict import BoundedDict

if TYPE_CHECKING:
    from gateway.records.tenants.tenants import Tenant

SAMPLE_SECONDS = 5.0
# Number of samples in the last minute, of samples in a point of the curves, and of points in an hour.
NOW_SAMPLES, POINT_SAMPLES, MAX_POINTS = 12, 12, 60
# Maximum tenants in a sample (the service of the others is summed up), and tenants whose names and waits are kept.
MAX_TENANTS, MAX_KNOWN = 500, 1000
# Maximum number of waits kept: of a tenant, and of all tenants together.
TENANT_WAITS, ALL_WAITS = 100, 2000
HOUR = 3600.0
# A waiting tenant with less than this part of its due counts as behind.
BEHIND = 0.8


class Share(NamedTuple):
    """Parts of the service of all tenants, from 0 to 1. None if there was no service. waited: fraction of the samples
    in which the tenant waited.
    """

    share: float | None
    due: float | None
    waited: float


class TenantFairness(NamedTuple):
    """Fairness of a tenant.

    waiting: its waiting requests, in this gateway process and on the engines; see `Waits` for the parts and `oldest`.
    p50, p95: waits of its requests that engines began to answer in the last hour, in the gateway's queue and, if an
    engine reports it, in that engine's queue. Times in seconds. service: its counter, in cost units per weight, over
    all gateways; None without requests.
    """

    tenant: str
    weight: float
    inside: int
    waiting: int
    waiting_in_gateway: int
    waiting_on_engines: int | None
    oldest: float | None
    p50: float | None
    p95: float | None
    service: float | None
    now: Share
    hour: Share

    @property
    def is_behind(self) -> bool:
        """Return whether the tenant waits and gets less than its due."""
        share, due = self.now.share, self.now.due
        return self.waiting > 0 and share is not None and due is not None and share < BEHIND * due


class PreemptionRow(NamedTuple):
    """Number of requests of `tenant` preempted on an engine since its start for requests of `by`."""

    engine: str
    tenant: str
    by: str
    number: int


@dataclass(slots=True)
class Sums:
    """Sums over samples. at: Unix seconds of the last one. service, due: by tenant id. waited: number of samples in
    which a tenant waited. jain: the index at the last sample.
    """

    at: int = 0
    samples: int = 0
    total: float = 0.0
    service: dict[str, float] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)
    waited: Counter[str] = field(default_factory=Counter)
    jain: float | None = None

    def add(self, other: "Sums") -> None:
        self.at, self.jain = max(self.at, other.at), other.jain
        self.samples += other.samples
        self.total += other.total
        self.waited.update(other.waited)
        for mine, theirs in ((self.service, other.service), (self.due, other.due)):
            for tenant_id, value in theirs.items():
                mine[tenant_id] = mine.get(tenant_id, 0.0) + value

    def share(self, tenant_id: str) -> Share:
        waited = self.waited[tenant_id] / self.samples if self.samples else 0.0
        if self.total <= 0:
            return Share(None, None, waited)
        return Share(self.service.get(tenant_id, 0.0) / self.total, self.due.get(tenant_id, 0.0) / self.total, waited)


class _Known(NamedTuple):
    """A tenant with its newest waits, as (time of `time.monotonic`, seconds)."""

    name: str
    weight: float
    waits: deque[tuple[float, float]]


class Fairness:
    """Samples of one gateway process. It is called for each addition of service, and for each start of an answer."""

    def __init__(
        self, queues: BaseQueues, counters: ServiceCounters, engines: Callable[[], list[EngineRecord]]
    ) -> None:
        self._queues = queues
        self._engines = engines
        self.since = time.time()
        self._service: dict[str, float] = {}
        # In the order of last use, the oldest first.
        self._known = BoundedDict[str, _Known](MAX_KNOWN)
        self._waits: deque[tuple[float, float]] = deque(maxlen=ALL_WAITS)
        self._recent: deque[Sums] = deque(maxlen=NOW_SAMPLES)
        self.points: deque[Sums] = deque(maxlen=MAX_POINTS)
        counters.observe_service = self._add_service

    async def watch(self) -> None:
        """Take samples until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._queues.count_service()
            self.sample()

    def note_start(self, tenant: "Tenant", seconds: float) -> None:
        """Note that an engine has begun to answer a request, which waited for these seconds in all queues."""
        wait = (time.monotonic(), seconds)
        self._waits.append(wait)
        self._see(tenant.id, tenant.name, tenant.weight)
        self._known[tenant.id].waits.append(wait)

    def sample(self) -> None:
        """Add a sample of the service since the last one."""
        service, self._service = self._service, {}
        places, engine_queues = self._queues.tenants(), EngineQueues(self._engines())
        for tenant_id, row in places.items():
            self._see(tenant_id, row.tenant, row.weight)
        active = {each: self._known[each].weight for each in {*service, *places} if each in self._known}
        taken = Sums(at=int(time.time()), samples=1, total=max(0.0, sum(service.values())))
        weights = sum(active.values())
        waiting = {each for each in active if _waits_of(each, places.get(each), engine_queues).waiting}
        kept = sorted(active, key=lambda each: (each in waiting, service.get(each, 0.0)), reverse=True)[:MAX_TENANTS]
        for tenant_id in kept:
            taken.service[tenant_id] = max(0.0, service.get(tenant_id, 0.0))
            taken.due[tenant_id] = taken.total * active[tenant_id] / weights
            taken.waited[tenant_id] += tenant_id in waiting
        self._recent.append(taken)
        taken.jain = self.jain()
        if not self.points or self.points[-1].samples >= POINT_SAMPLES:
            self.points.append(Sums())
        self.points[-1].add(taken)

    @property
    def now(self) -> Sums:
        return _summed(self._recent)

    @property
    def hour(self) -> Sums:
        return _summed(self.points)

    def jain(self) -> float | None:
        """Return Jain's index on service per weight over the last minute: 1 is fair, 1/n the worst for n tenants.

        It counts the tenants that waited in each sample; None with fewer than two, or without service.
        """
        if len(self._recent) < 2:
            return None
        now = self.now
        rates = [
            now.service.get(each, 0.0) / self._known[each].weight
            for each, waited in now.waited.items()
            if waited == now.samples and each in self._known
        ]
        squares = sum(rate * rate for rate in rates)
        return sum(rates) ** 2 / (len(rates) * squares) if len(rates) > 1 and squares else None

    def jain_hour(self) -> float | None:
        """Return the mean of the index over the points of the last hour that have one."""
        found = [point.jain for point in self.points if point.jain is not None]
        return sum(found) / len(found) if found else None

    def waits(self) -> Waits:
        """Return the requests of all tenants that wait now."""
        return EngineQueues(self._engines()).total(self._queues.waiting, self._queues.longest_wait)

    def wait_percentiles(self) -> tuple[float | None, float | None]:
        """Return p50 and p95 of the last hour's waits, at most ALL_WAITS of them, in seconds."""
        return _percentiles(self._waits)

    def tenants(self) -> list[TenantFairness]:
        """Return the tenants with requests now or service in the last hour."""
        now, hour = self.now, self.hour
        places, engine_queues = self._queues.tenants(), EngineQueues(self._engines())
        for tenant_id, row in places.items():
            self._see(tenant_id, row.tenant, row.weight)
        return [
            self._row(each, places.get(each), engine_queues, now, hour)
            for each in {**hour.service, **places}
            if each in self._known
        ]

    def of(self, tenant_id: str) -> TenantFairness | None:
        """Return a tenant's row; None without requests now or service in the last hour."""
        now, hour, places = self.now, self.hour, self._queues.tenants()
        if tenant_id not in self._known or (tenant_id not in places and tenant_id not in hour.service):
            return None
        return self._row(tenant_id, places.get(tenant_id), EngineQueues(self._engines()), now, hour)

    def preemptions(self) -> list[PreemptionRow]:
        """Return the counts that the engines report, the largest first. An unknown tenant is shown by its id."""
        rows = [
            PreemptionRow(engine.url, self.name(each.tenant), self.name(each.by), each.number)
            for engine in self._engines()
            for each in engine.state.preempted
        ]
        return sorted(rows, key=lambda row: -row.number)

    def name(self, tenant_id: str) -> str:
        known = self._known.get(tenant_id)
        return known.name if known is not None else tenant_id

    def _row(
        self, tenant_id: str, place: TenantPlaces | None, engine_queues: EngineQueues, now: Sums, hour: Sums
    ) -> TenantFairness:
        known = self._known[tenant_id]
        p50, p95 = _percentiles(known.waits)
        waits = _waits_of(tenant_id, place, engine_queues)
        return TenantFairness(
            tenant=known.name,
            weight=known.weight,
            inside=place.inside if place else 0,
            **waits.counts,
            oldest=waits.oldest,
            p50=p50,
            p95=p95,
            service=place.service if place else None,
            now=now.share(tenant_id),
            hour=hour.share(tenant_id),
        )

    def _add_service(self, tenant_id: str, service: float) -> None:
        self._service[tenant_id] = self._service.get(tenant_id, 0.0) + service

    def _see(self, tenant_id: str, name: str, weight: float) -> None:
        known = self._known.get(tenant_id)
        waits = known.waits if known is not None else deque(maxlen=TENANT_WAITS)
        self._known.put(tenant_id, _Known(name, weight, waits))


def _waits_of(tenant_id: str, place: TenantPlaces | None, engine_queues: EngineQueues) -> Waits:
    return engine_queues.of(tenant_id, place.waiting if place else 0, place.waited if place else 0.0)


def _summed(parts: Iterable[Sums]) -> Sums:
    total = Sums()
    for part in parts:
        total.add(part)
    return total


def _percentiles(waits: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Return p50 and p95 of the waits of the last hour."""
    least = time.monotonic() - HOUR
    found = sorted(seconds for at, seconds in waits if at >= least)
    if not found:
        return None, None
    return found[(len(found) - 1) // 2], found[min(len(found) - 1, int(0.95 * len(found)))]
