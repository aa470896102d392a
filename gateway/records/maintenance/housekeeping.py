"""Hourly chores of the installation: collecting adapters and sweeping old records, in one elected process.

A process with a wrong clock runs none: if the clock is ahead, every record seems old, and removed usage rows are lost.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from gateway.errors import Unavailable
from gateway.process.background import running
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import HOUSEKEEPING_KEY
from gateway.redis.sweeps import Client, is_first

log = logging.getLogger(__name__)

EVERY_SECONDS = 3600.0
# Pause between two attempts of a process to get the turn.
ASK_SECONDS = 60.0
# Maximum difference between this process's clock and Redis', whose time the usage rows have.
CLOCK_SECONDS = 3600.0
# Minimum pause between two log lines about a clock that stays wrong.
LOG_SECONDS = 3600.0
# A key routes the script to one node of a cluster.
TIME = "return redis.call('TIME')"
# A separate generator, because the shared generator's state belongs to the program.
JITTER = random.Random()

Chore = Callable[[], Awaitable[object]]


class Housekeeping:
    """Runner of the chores, by name. The first process that asks for the turn gets it for EVERY_SECONDS.

    logs_clock: whether this process logs a wrong clock; one process of a machine is enough.
    """

    def __init__(
        self, redis: Client, redis_timeout: float, chores: Mapping[str, Chore], *, logs_clock: bool = True
    ) -> None:
        self._logs_clock = logs_clock
        # Time of the last log line about a wrong clock; None while the clock is right.
        self._clock_logged_at: float | None = None
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
            # Asked in this order, so that a process with a wrong clock takes no turn from the others.
            if await self._is_on_time() and await self._is_elected():
                for name, chore in self._chores.items():
                    await self._do(name, chore)

    async def _is_on_time(self) -> bool:
        """Return whether this process's clock agrees with Redis'. Without an answer it counts as wrong."""
        answer = await self._ask(self._redis.execute_command("EVAL", TIME, 1, HOUSEKEEPING_KEY))
        if answer is None:
            return False
        ahead = datetime.now(UTC).timestamp() - int(answer[0])
        if self._logs_clock:
            self._log_clock(ahead)
        return abs(ahead) <= CLOCK_SECONDS

    def _log_clock(self, ahead: float) -> None:
        """Log a wrong clock at its beginning, every LOG_SECONDS, and at its end."""
        logged_at, now = self._clock_logged_at, time.monotonic()
        if abs(ahead) <= CLOCK_SECONDS:
            if logged_at is not None:
                log.warning("housekeeping goes on: the clock of this machine agrees with that of Redis again")
            self._clock_logged_at = None
        elif logged_at is None or now - logged_at >= LOG_SECONDS:
            self._clock_logged_at = now
            log.error(
                "housekeeping is postponed: the clock of this machine is %.0f h %s that of Redis; correct one of them",
                abs(ahead) / 3600,
                "ahead of" if ahead > 0 else "behind",
            )

    async def _is_elected(self) -> bool:
        return bool(await self._ask(is_first(self._redis, HOUSEKEEPING_KEY, EVERY_SECONDS)))

    async def _ask(self, call: Awaitable[Any]) -> Any:
        """Return the result of a call to Redis, None if Redis is unreachable."""
        try:
            async with asyncio.timeout(self._redis_timeout):
                return await call
        except REDIS_ERRORS as error:
            # The quota code logs an outage of Redis.
            log.debug("housekeeping is postponed, because redis is unreachable: %s", error)
            return None

    async def _do(self, name: str, chore: Chore) -> None:
        try:
            log.info("housekeeping: %s: %s", name, await chore())
        except Unavailable as error:
            log.warning("housekeeping: %s is postponed to the next run: %s", name, error)
        except Exception:
            # The other chores and the next turn do not depend on this one.
            log.exception("housekeeping: %s failed", name)
