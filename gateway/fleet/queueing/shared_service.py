"""Exchange of the tenants' service between all gateway processes, through Redis.

Each process adds its own service and reads the sums, so that a tenant has one share over all gateways and engines.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from typing import Any

from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import service_keys

log = logging.getLogger(__name__)

# Interval of the exchanges, and so the maximum age of the counters. At 1,000 tokens a second for a tenant, the error is
# 250 tokens, less than one answer.
SECONDS = 0.25
# Active tenants of a process that an exchange may have without a longer interval, and the longest interval. An exchange
# takes Redis 10 us for each, so a process needs at most 1 % of it up to 2,000 active tenants.
USUAL_TENANTS = 250
MAX_SECONDS = 2.0
# Interval while no tenant is active here. The first request of a tenant ends it.
IDLE_SECONDS = 2.0
# Time-out of an exchange, and the time without an exchange after which a process counts as dead.
CALL_SECONDS = 1.0
ALIVE_SECONDS = 5.0
SCRIPT = "service_counters.lua"


class SharedService:
    """Exchange of one process. deployment: a value that only its processes share, such as the database URL."""

    def __init__(self, redis: Any, deployment: str, counters: ServiceCounters) -> None:
        script = resources.files("gateway.fleet.queueing").joinpath(SCRIPT).read_text("utf-8")
        self._script = redis.register_script(script)
        self._keys = service_keys(deployment)
        self._process = os.urandom(8).hex()
        self._counters = counters
        self._outage = Outage(log, "the exchange of the tenants' service")
        self._has_active = asyncio.Event()
        counters.observe_first = self._has_active.set

    async def exchange(self) -> None:
        """Exchange once. While Redis is away, the process counts its own service only.

        An exchange without a reply is repeated although Redis may have applied it. The error is one interval's service.
        """
        changes = self._counters.changes()
        arguments: list[str | float] = [self._process, int(1000 * ALIVE_SECONDS)]
        for change in changes:
            arguments += [change.tenant_id, change.weight, change.service, int(change.is_active)]
        try:
            async with asyncio.timeout(CALL_SECONDS):
                weight, *values = await self._script(keys=self._keys, args=arguments)
        except REDIS_ERRORS as error:
            self._outage.failed(type(error).__name__, "each process orders its queue by its own counters")
            self._counters.exchange_failed()
            return
        self._outage.over()
        results = [(float(counter), int(number)) for counter, number in zip(values[::2], values[1::2], strict=True)]
        self._counters.exchanged(changes, float(weight), results)

    async def watch(self, count_service: Callable[[], None], changed: Callable[[], None]) -> None:
        """Exchange until cancelled. count_service: called before each exchange. changed: called after it."""
        while True:
            await asyncio.sleep(interval(self._counters.number))
            if not self._counters.number:
                self._has_active.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_SECONDS):
                        await self._has_active.wait()
            count_service()
            await self.exchange()
            changed()


def interval(tenants: int) -> float:
    """Return the seconds until an exchange of this many tenants' counters."""
    return min(SECONDS * max(1.0, tenants / USUAL_TENANTS), MAX_SECONDS)
