"""Checks of golden answers in the background, after an engine's release or base model has changed.

One gateway at a time asks the prompts of one version, one after another, while no request waits and the engine runs at
most half of what it can. Then all gateways rest, so that checks use at most a quarter of one place of one engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from redis.exceptions import RedisError

from gateway.api.golden.checking import GoldenChecks
from gateway.billing.sweeps import Client, is_first
from gateway.errors import GatewayError, Unavailable
from gateway.fleet.engine import EngineRecord, EngineSoftware
from gateway.fleet.queue import Gate
from gateway.fleet.registry import Registry
from gateway.process.background import running
from gateway.records.golden import Golden, Unchecked
from gateway.records.tenants import Tenants

log = logging.getLogger(__name__)

# Pause between searches, and the time limit of one version's check.
SEARCH_SECONDS, CHECK_SECONDS = 2.0, 300.0
# Rest after a check, as a multiple of its time.
REST = 3.0
# A turn outlasts its check, so that a gateway never ends another's.
TURN_SECONDS = CHECK_SECONDS + 60.0
# Key of the gateway that checks.
TURN = "loraplex:golden"
START = ("", 0)


class Upgrades:
    """Search for golden answers that have no check under an available engine's software."""

    def __init__(
        self, golden: Golden, checks: GoldenChecks, tenants: Tenants, registry: Registry, gate: Gate, redis: Client
    ) -> None:
        self._golden = golden
        self._checks = checks
        self._tenants = tenants
        self._registry = registry
        self._gate = gate
        self._redis = redis
        # The last version tried under each software, so that one that cannot be checked now delays no other.
        self._places: dict[EngineSoftware, tuple[str, int]] = {}

    async def running(self, _: object) -> AsyncIterator[None]:
        """Search beside an application."""
        async with running(self.watch()):
            yield

    async def watch(self) -> None:
        """Check versions until cancelled."""
        while True:
            await asyncio.sleep(SEARCH_SECONDS)
            try:
                if not self._gate.waiting:
                    await self._check_next()
            except (Unavailable, RedisError, OSError, TimeoutError) as error:
                log.debug("golden answers are checked later: %s", type(error).__name__)
            except Exception:
                # The next search does not depend on this one.
                log.exception("golden answers could not be checked")

    async def _check_next(self) -> None:
        """Check one version, if it is this process's turn."""
        engines = {each.software: each for each in self._registry.up if _has_room(each)}
        for software, engine in engines.items():
            place = self._places.get(software, START)
            found = await self._golden.unchecked(software, place)
            if found is None:
                self._places.pop(software, None)
            elif await is_first(self._redis, TURN, TURN_SECONDS):
                self._places[software] = found.place
                await self._check(found, engine)
                return

    async def _check(self, found: Unchecked, engine: EngineRecord) -> None:
        """Check a version, then set the end of the turn."""
        began = time.monotonic()
        try:
            tenant = await self._tenants.get(found.tenant_name)
            async with asyncio.timeout(CHECK_SECONDS):
                await self._checks.check(tenant, found.name, found.version, engine)
        except (GatewayError, TimeoutError) as error:
            log.debug("golden answers of tenant %s are checked later: %s", found.tenant_name, type(error).__name__)
        finally:
            rest = REST * (time.monotonic() - began)
            await self._redis.pexpire(TURN, max(1, int(rest * 1000)))


def _has_room(engine: EngineRecord) -> bool:
    """Return whether the engine can take a request of the lowest priority: it runs at most half of its places."""
    return engine.available and 2 * engine.load < max(2, engine.slots)
