"""Service of this process's requests by engine, reported to the other engines.

An engine counts only the service that it gives. With the service at the other engines added, its scheduler orders
tenants by their service in the whole fleet, so that a tenant that is spread over all engines has one share. A single
gateway process measures the service of a request, and every process reports to every engine, so the sum needs no shared
store.
"""

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from heapq import nlargest
from typing import Protocol
from weakref import WeakKeyDictionary

from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.problems import EngineProblems
from wire.http_errors import HTTP_ERRORS
from wire.service import MAX_TENANTS, ServiceElsewhere

log = logging.getLogger(__name__)

# Interval of the reports; equal to the interval of the exchange between gateways (`shared_service.py`).
SECONDS = 0.25
# Reports in a round. In a larger fleet the engines take turns, and a report has only tenants with requests on the
# engine, because an engine ignores the others.
MAX_REPORTS = 64
# Seconds for which a failed report is sent again. An engine that accepts none for longer is down: the service of that
# time, charged at once after its return, would make a tenant that was served elsewhere wait for all others there.
REPEAT_SECONDS = 5.0


class SendService(Protocol):
    async def __call__(self, engine: EngineRecord, report: ServiceElsewhere) -> None:
        """Report service at other engines. Raises ClientError, OSError, TimeoutError."""


class EngineService:
    """Counts of one process. engines: returns the engines of the fleet. send: sends an engine its report."""

    def __init__(
        self,
        engines: Callable[[], list[EngineRecord]],
        send: SendService,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._send = send
        self._clock = clock
        self._served: dict[str, dict[str, float]] = {}
        self._reporter = os.urandom(8).hex()
        self._number = 0
        # By engine: service at the other engines that is not reported yet, the report in flight, and the failed one
        # with the time (monotonic) at which it was first sent.
        self._unreported: WeakKeyDictionary[EngineRecord, dict[str, float]] = WeakKeyDictionary()
        self._reporting: WeakKeyDictionary[EngineRecord, asyncio.Task[None]] = WeakKeyDictionary()
        self._failed: WeakKeyDictionary[EngineRecord, tuple[ServiceElsewhere, float]] = WeakKeyDictionary()
        self._problems = EngineProblems(log)
        # Place of the first engine that gets a report in the next round, in a large fleet.
        self._turn = 0

    def served(self, engine: EngineRecord, tenant_id: str, cost: float) -> None:
        """Add service that the engine has given the tenant."""
        counts = self._served.setdefault(engine.url, defaultdict(float))
        counts[tenant_id] += cost

    def report(self) -> list[asyncio.Task[None]]:
        """Start a report to each engine of the service at the other engines, and return the reports' tasks.

        An engine with a report in flight gets its service with the next one, so a slow engine delays no other. A report
        has the MAX_TENANTS tenants with most service; the others follow in the next one. A report that fails is sent
        again before the next one, with its number, because the engine may have applied it.
        """
        served, self._served = self._served, {}
        total: dict[str, float] = defaultdict(float)
        for counts in served.values():
            for tenant_id, cost in counts.items():
                total[tenant_id] += cost
        started = []
        engines = [engine for engine in self._engines() if engine.address.traits.orders_tenants]
        is_large = len(engines) > MAX_REPORTS
        for place, engine in enumerate(engines):
            here, waiting = served.get(engine.url, {}), self._unreported.setdefault(engine, {})
            for tenant_id in total.keys() & _tenants_on(engine) if is_large else total:
                if (elsewhere := total[tenant_id] - here.get(tenant_id, 0.0)) > 0:
                    waiting[tenant_id] = waiting.get(tenant_id, 0.0) + elsewhere
            has_turn = not is_large or (place - self._turn) % len(engines) < MAX_REPORTS
            if has_turn and engine not in self._reporting and (report := self._next_report(engine, waiting)):
                task = self._reporting[engine] = asyncio.create_task(self._report(engine, *report))
                started.append(task)
        self._turn += MAX_REPORTS
        return started

    def _next_report(self, engine: EngineRecord, waiting: dict[str, float]) -> tuple[ServiceElsewhere, float] | None:
        """Return the engine's next report and the time at which it was first sent; None if there is none."""
        now = self._clock()
        if (failed := self._failed.pop(engine, None)) is not None:
            if now - failed[1] < REPEAT_SECONDS:
                return failed
            waiting.clear()
        if not waiting:
            return None
        largest = dict(nlargest(MAX_TENANTS, waiting.items(), lambda item: item[1]))
        for tenant_id in largest:
            del waiting[tenant_id]
        self._number += 1
        return ServiceElsewhere(largest, self._reporter, self._number), now

    async def watch(self, count_service: Callable[[], None]) -> None:
        """Report until cancelled. count_service: called before each report."""
        try:
            while True:
                await asyncio.sleep(SECONDS)
                count_service()
                self.report()
        finally:
            for task in list(self._reporting.values()):
                task.cancel()

    async def _report(self, engine: EngineRecord, report: ServiceElsewhere, first_sent: float) -> None:
        try:
            await self._send(engine, report)
        except HTTP_ERRORS as error:
            self._failed[engine] = report, first_sent
            problem = "counts only its own service when it orders tenants: a report of service elsewhere failed"
            self._problems.found(engine, problem, type(error).__name__)
        else:
            self._problems.ended(engine)
        finally:
            self._reporting.pop(engine, None)


def _tenants_on(engine: EngineRecord) -> set[str]:
    """Return the tenants with requests on the engine, as far as this process knows."""
    return engine.requests.by_tenant.keys() | {share.tenant for share in engine.state.tenants}
