"""Hourly chores of the installation: collecting adapters and sweeping old records, in one elected process."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from gateway.billing.sweeps import Client, is_first
from gateway.errors import Unavailable
from gateway.process.background import running
from gateway.redis.errors import REDIS_ERRORS

log = logging.getLogger(__name__)

TURN = "loraplex:housekeeping"
EVERY_SECONDS = 3600.0
# Pause between two attempts of a process to get the turn.
ASK_SECONDS = 60.0
# A separate generator, because the shared generator's state belongs to the program.
JITTER = random.Random()

Chore = Callable[[], Awaitable[object]]


class Housekeeping:
    """Runner of the chores, by name. The first process that asks for the turn gets it for EVERY_SECONDS."""

    def __init__(self, redis: Client, redis_timeout: float, chores: Mapping[str, Chore]) -> None:
        self._redis = redis
        self._redis_timeout = redis_timeout
        self._chores = chores

    async def running(self, _: object) -> AsyncIterator[None]:
        """Run the chores beside an application."""
        async with running(self.run()):
            yield

    async def run(self) -> None:
        """Run the chores whenever this process is elected, until cancelled. Run it as a task."""
        while True:
            # The pause is uneven, so that no process is always the first to ask.
            await asyncio.sleep(ASK_SECONDS * JITTER.uniform(0.75, 1.25))
            if await self._is_elected():
                for name, chore in self._chores.items():
                    await self._do(name, chore)

    async def _is_elected(self) -> bool:
        try:
            async with asyncio.timeout(self._redis_timeout):
                return await is_first(self._redis, TURN, EVERY_SECONDS)
        except REDIS_ERRORS as error:
            # The quota code logs an outage of Redis.
            log.debug("housekeeping is postponed, because redis is unreachable: %s", error)
            return False

    async def _do(self, name: str, chore: Chore) -> None:
        try:
            log.info("housekeeping: %s: %s", name, await chore())
        except Unavailable as error:
            log.warning("housekeeping: %s is postponed to the next run: %s", name, error)
        except Exception:
            # The other chores and the next turn do not depend on this one.
            log.exception("housekeeping: %s failed", name)
