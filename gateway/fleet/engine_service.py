"""Service of this process's requests by engine, reported to the other engines.

An engine counts only the service that it gives. With the service at the other engines added, its scheduler orders
tenants by their service in the whole fleet, so that a tenant that is spread over all engines has one share. One gateway
process measures the service of a request, and every process reports to every engine, so the sum needs no shared store.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from heapq import nlargest
from typing import Protocol

from aiohttp import ClientError

from gateway.fleet.engine import EngineRecord
from wire.service import MAX_TENANTS

log = logging.getLogger(__name__)

# Interval of the reports; equal to the interval of the exchange between gateways (`shared_service.py`).
SECONDS = 0.25


class Sender(Protocol):
    async def __call__(self, engine: EngineRecord, service: dict[str, float]) -> None:
        """Report service at other engines. Raises ClientError, OSError, TimeoutError."""


class EngineService:
    """Counts of one process. engines: returns the engines of the fleet. send: sends an engine its report."""

    def __init__(self, engines: Callable[[], list[EngineRecord]], send: Sender) -> None:
        self._engines = engines
        self._send = send
        self._served: dict[str, dict[str, float]] = {}
        self._failing: set[str] = set()

    def served(self, engine: EngineRecord, tenant: str, cost: float) -> None:
        """Add service that the engine has given the tenant."""
        counts = self._served.setdefault(engine.url, defaultdict(float))
        counts[tenant] += cost

    async def report(self) -> None:
        """Send each engine the service at the other engines since the last report.

        A report has the MAX_TENANTS tenants with most service. A report that fails is not repeated, because the engine
        may have applied it: the error is one interval's service.
        """
        served, self._served = self._served, {}
        total: dict[str, float] = defaultdict(float)
        for counts in served.values():
            for tenant, cost in counts.items():
                total[tenant] += cost
        reports = []
        for engine in self._engines():
            here = served.get(engine.url, {})
            elsewhere = {tenant: cost for tenant in total if (cost := total[tenant] - here.get(tenant, 0.0)) > 0}
            if elsewhere and engine.address.traits.orders_tenants:
                reports.append(self._report(engine, dict(nlargest(MAX_TENANTS, elsewhere.items(), lambda t: t[1]))))
        await asyncio.gather(*reports)

    async def watch(self, charge: Callable[[], None]) -> None:
        """Report until cancelled. charge: called before each report."""
        while True:
            await asyncio.sleep(SECONDS)
            charge()
            await self.report()

    async def _report(self, engine: EngineRecord, service: dict[str, float]) -> None:
        try:
            await self._send(engine, service)
        except (ClientError, OSError, TimeoutError) as error:
            if engine.url not in self._failing:
                self._failing.add(engine.url)
                log.warning(
                    "engine %s does not accept the service of tenants at other engines (%s); it orders tenants by its "
                    "own service",
                    engine.url,
                    type(error).__name__,
                )
        else:
            self._failing.discard(engine.url)
