"""Background checks of golden answers, after an engine's release or base model has changed.

A single gateway at a time searches for a version without a check and asks its prompts, one after another, while no
request waits for the engine's base model and the engine uses less than half of its places. Then all gateways rest for
three times as long, so checks use at most a quarter of one place of one engine. The version's tenant rests longer, so
tenants with slow checks do not delay the others' checks.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable

from gateway.api.golden.checking import GoldenChecks
from gateway.errors import GatewayError, Unavailable
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.queueing.base_queues import BaseQueues
from gateway.process.background import running
from gateway.records.adapters.golden import Golden, Unchecked
from gateway.records.bases.base import EngineSoftware
from gateway.records.tenants.tenants import Tenants
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import GOLDEN_KEY, golden_rest_key
from gateway.redis.sweeps import Client, is_first

log = logging.getLogger(__name__)

# Pause between searches, and the time limit of one version's check, in seconds.
SEARCH_SECONDS, CHECK_SECONDS = 2.0, 300.0
# Rests after a search or a check, as multiples of its time: of all gateways, and of the version's tenant. A tenant's
# checks, with the rests after them, take at most a quarter of the time.
REST, TENANT_REST = 3.0, 16.0
# Lifetimes of a turn whose gateway has died, in seconds: during its search, and during a check. The second exceeds a
# check and its record, so checks never overlap.
SEARCH_TURN_SECONDS, TURN_SECONDS = 5.0, CHECK_SECONDS + 60.0
START = ("", 0)


class Upgrades:
    """Search for golden answers without a check under an available engine's software."""

    def __init__(
        self,
        golden: Golden,
        checks: GoldenChecks,
        tenants: Tenants,
        registry: Registry,
        queues: BaseQueues,
        redis: Client,
    ) -> None:
        self._golden = golden
        self._checks = checks
        self._tenants = tenants
        self._registry = registry
        self._queues = queues
        self._redis = redis
        # The last version found under each software and base model; the next search goes on behind it.
        self._places: dict[tuple[EngineSoftware, str], tuple[str, int]] = {}

    async def running(self, _: object) -> AsyncIterator[None]:
        """Search beside an application."""
        async with running(self.watch()):
            yield

    async def watch(self) -> None:
        """Check versions until cancelled."""
        while True:
            await asyncio.sleep(SEARCH_SECONDS)
            try:
                if idle_engines(self._registry.up, self._queues) and await is_first(
                    self._redis, GOLDEN_KEY, SEARCH_TURN_SECONDS
                ):
                    await self._take_turn()
            except (Unavailable, *REDIS_ERRORS) as error:
                log.debug("golden answers are checked later: %s", type(error).__name__)
            except Exception:
                # The next search does not depend on this one.
                log.exception("golden answers could not be checked")

    async def _take_turn(self) -> None:
        """Check at most one version, then set the end of the turn."""
        began = time.monotonic()
        try:
            await self._check_next()
        finally:
            rest = max(SEARCH_SECONDS, REST * (time.monotonic() - began))
            await self._redis.pexpire(GOLDEN_KEY, _milliseconds(rest))

    async def _check_next(self) -> None:
        for (software, base), engine in idle_engines(self._registry.up, self._queues).items():
            found = await self._golden.unchecked(software, base, self._places.get((software, base), START))
            if found is None:
                self._places.pop((software, base), None)
                continue
            self._places[software, base] = found.place
            if not await self._redis.exists(golden_rest_key(found.tenant_id)):
                # A search that took longer than its turn is dropped: another gateway may have found the same version.
                if await self._redis.pexpire(GOLDEN_KEY, _milliseconds(TURN_SECONDS)):
                    await self._check(found, engine)
                return

    async def _check(self, unchecked: Unchecked, engine: EngineRecord) -> None:
        began = time.monotonic()
        try:
            tenant = await self._tenants.get(unchecked.tenant_name)
            async with asyncio.timeout(CHECK_SECONDS):
                await self._checks.check(tenant, unchecked.name, unchecked.version, engine)
        except (GatewayError, TimeoutError) as error:
            log.debug("golden answers of tenant %s are checked later: %s", unchecked.tenant_name, type(error).__name__)
        finally:
            rest = TENANT_REST * (time.monotonic() - began)
            await self._redis.set(golden_rest_key(unchecked.tenant_id), b"", px=_milliseconds(rest))


def idle_engines(engines: Iterable[EngineRecord], queues: BaseQueues) -> dict[tuple[EngineSoftware, str], EngineRecord]:
    """Return an engine with room of each software and base model (its id) for which no request waits."""
    return {
        (each.software, each.base): each
        for each in engines
        if each.base is not None and has_room(each) and not queues.of(each.base).waiting
    }


def has_room(engine: EngineRecord) -> bool:
    """Return whether the engine can take a request of the lowest priority: less than half of its places are used."""
    return engine.available and 2 * engine.load < max(2, engine.slots)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
