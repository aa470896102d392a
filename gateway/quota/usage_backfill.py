"""Backfill of a budget's spend and a day's usage from the ledger, if Redis has lost them.

The script (quota.lua) admits nothing on a limit without state, nor while it drops another server's states. It also
merges the sums that several gateways copy at once, so that nothing counts twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from gateway.errors import Unavailable
from gateway.limits.kinds import ROLLING_BUDGET
from gateway.limits.periods import period_start
from gateway.quota.limits import Limit
from gateway.quota.reservation import EPOCH
from gateway.quota.store import unavailable
from gateway.records.past_usage import ALL, UsagePart

log = logging.getLogger(__name__)

# The script's reply if it needs the past usage of limits first, and the maximum number of tries.
UNKNOWN = 2
BACKFILL_TRIES = 3
# Pause between two calls while the script drops another server's states, and the time limit of a request for that.
DROP_PAUSE_SECONDS, DROP_SECONDS = 0.025, 5.0

HOUR, DAY = timedelta(hours=1), timedelta(days=1)

Script = Callable[..., Awaitable[Any]]


class LedgerSums(Protocol):
    """Usage sums from the ledger, implemented by `gateway.records.past_usage.PastUsage`. Raises Unavailable."""

    async def cost(self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL) -> int: ...

    async def by_hour(
        self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL, *, tokens: bool = True
    ) -> list[tuple[datetime, int]]: ...

    async def cost_by_day(
        self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL
    ) -> dict[datetime, int]: ...

    async def valid_families(self, tenant_id: str, families: Collection[str], since: datetime) -> set[str]: ...


class Used(NamedTuple):
    """Usage before a given time. counted: the part that still counts against the limit. total: all usage before that
    time. days: for a rolling budget, the costs of its days, the oldest first.
    """

    counted: float
    total: int
    days: tuple[int, ...] = ()


class UsageBackfill:
    """Backfill of lost usage. script: `QuotaStore.script`. past: None without a ledger, so without earlier usage."""

    def __init__(self, script: Script, past: LedgerSums | None) -> None:
        self._script = script
        self._past = past
        # (tenant id, field, time) -> the running backfill. All requests that need it wait for the same task.
        self._running: dict[tuple[str, str, int], asyncio.Task[None]] = {}
        # Tenant id -> lock of the request that waits for the end of a drop.
        self._drops: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def acquire(
        self, tenant_id: str, limits: Sequence[Limit], call: Sequence[Any], reply: list[Any]
    ) -> list[Any]:
        """Backfill the usage that Redis has lost and repeat the call. Return its reply.

        reply: the one to the first call, UNKNOWN. Raises Unavailable for Redis and the ledger.
        """
        for _ in range(BACKFILL_TRIES):
            if len(reply) == 1:
                reply = await self._dropped(tenant_id, call)
            unknown = [(limits[reply[i]], reply[i + 1]) for i in range(1, len(reply), 2)] if reply[0] == UNKNOWN else []
            if not unknown:
                return reply
            await self.load(tenant_id, unknown)
            reply = await self._script(tenant_id, *call)
            if reply[0] != UNKNOWN:
                return reply
        raise unavailable()

    async def _dropped(self, tenant_id: str, call: Sequence[Any]) -> list[Any]:
        """Repeat a call until the script has dropped another server's states of the tenant. Return its reply.

        A single request of this process at a time repeats its call. Raises Unavailable.
        """
        lock = self._drops.setdefault(tenant_id, asyncio.Lock())
        try:
            async with asyncio.timeout(DROP_SECONDS), lock:
                while True:
                    reply: list[Any] = await self._script(tenant_id, *call)
                    if len(reply) > 1:
                        return reply
                    await asyncio.sleep(DROP_PAUSE_SECONDS)
        except TimeoutError:
            raise unavailable() from None

    async def load(self, tenant_id: str, unknown: Sequence[tuple[Limit, int]]) -> None:
        """Backfill the usage of each limit before a given time (microseconds, Redis' clock). Raises Unavailable."""
        for task in [self._start(tenant_id, limit, since) for limit, since in unknown]:
            await asyncio.shield(task)

    def reload(self, tenant_id: str, limit: Limit, since: int) -> None:
        """Repeat a backfill in the background, for rows that have reached the ledger since the last one."""
        self._start(tenant_id, limit, since)

    async def close(self) -> None:
        """Cancel the running backfills."""
        for task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running.values()))

    def _start(self, tenant_id: str, limit: Limit, since: int) -> "asyncio.Task[None]":
        key = (tenant_id, limit.field, since)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._load(tenant_id, limit, since))
            task.add_done_callback(lambda done: self._done(key, done))
        return task

    def _done(self, key: tuple[str, str, int], task: "asyncio.Task[None]") -> None:
        del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Waiting requests get the exception. After a failed repetition the script asks for another one.
            level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
            log.log(level, "the past usage of limit %s cannot be read from the ledger: %s", key[1], error)

    async def _load(self, tenant_id: str, limit: Limit, since: int) -> None:
        used = await self.used(tenant_id, limit, since)
        counted, known, days = repr(used.counted), used.total, used.days
        await self._script(tenant_id, "backfill", limit.field, limit.value, since, counted, known, *days)

    async def used(self, tenant_id: str, limit: Limit, since: int) -> Used:
        """Return the usage before a given time (microseconds, Redis' clock). Raises Unavailable."""
        past = self._past
        if past is None:
            return Used(0.0, 0)
        until = EPOCH + timedelta(microseconds=since)
        if length := ROLLING_BUDGET.get(limit.letter):
            start = period_start(limit.letter, until)
            costs = await past.cost_by_day(tenant_id, start, until, limit.part)
            days = tuple(costs.get(start + number * DAY, 0) for number in range(length))
            return Used(sum(days), sum(days), days)
        if limit.kind.is_budget:
            cost = await past.cost(tenant_id, period_start(limit.letter, until), until, limit.part)
            return Used(cost, cost)
        first = (until - DAY).replace(minute=0, second=0, microsecond=0)
        hours = await past.by_hour(tenant_id, first, until, limit.part, tokens=not limit.kind.takes_one)
        return Used(still_counted(hours, limit.value, until), sum(amount for _, amount in hours))


def still_counted(hours: Sequence[tuple[datetime, int]], limit: int, until: datetime) -> float:
    """Return the requests or tokens of these hours that are still counted at `until` if `limit` a day are paid off.

    The usage of an hour counts as if taken at the hour's end, or at `until` if that is earlier, so the result is never
    too low, and too high by at most an hour's pay-off. It can exceed a lowered limit; the script pays that off within a
    day.
    """
    left, at = 0.0, EPOCH
    for start, amount in hours:
        end = min(start + HOUR, until)
        left = max(0.0, left - (end - at) / DAY * limit) + amount
        at = end
    return max(0.0, left - (until - at) / DAY * limit)
