"""Recall of a month's spend and a day's tokens: copied from the ledger into Redis where Redis has lost them.

The script (quota.lua) admits nothing on a limit without state, and defines how the sums that several gateways copy at
once add up: nothing counts twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from gateway.billing.past import ALL, Part
from gateway.errors import Unavailable
from gateway.quota.limits import Limit
from gateway.quota.reservation import EPOCH

log = logging.getLogger(__name__)

HOUR, DAY = timedelta(hours=1), timedelta(days=1)

Script = Callable[..., Awaitable[Any]]


class Past(Protocol):
    """Usage sums from the ledger; `gateway.billing.past.UsagePast` implements it. Raises Unavailable."""

    async def cost(self, tenant_id: str, since: datetime, until: datetime, part: Part = ALL) -> int: ...

    async def tokens_by_hour(
        self, tenant_id: str, since: datetime, until: datetime, part: Part = ALL
    ) -> list[tuple[datetime, int]]: ...


class Recall:
    """script: `Store.script`. past: None without a ledger, where no earlier usage exists."""

    def __init__(self, script: Script, past: Past | None) -> None:
        self._script = script
        self._past = past
        # One at a time of each limit and moment, however many requests wait for it.
        self._running: dict[tuple[str, str, int], asyncio.Task[None]] = {}

    async def bring(self, tenant_id: str, unknown: Sequence[tuple[Limit, int]]) -> None:
        """What was used of each before a moment (microseconds, Redis' clock). Raises Unavailable."""
        for task in [self._start(tenant_id, limit, since) for limit, since in unknown]:
            await asyncio.shield(task)

    def check(self, tenant_id: str, limit: Limit, since: int) -> None:
        """Brings, in the background, what the ledger has learnt of since the last time."""
        self._start(tenant_id, limit, since)

    async def close(self) -> None:
        """Gives up what runs."""
        for task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running.values()))

    def _start(self, tenant_id: str, limit: Limit, since: int) -> "asyncio.Task[None]":
        of = (tenant_id, limit.field, since)
        task = self._running.get(of)
        if task is None:
            task = self._running[of] = asyncio.create_task(self._bring(tenant_id, limit, since))
            task.add_done_callback(lambda done: self._done(of, done))
        return task

    def _done(self, of: tuple[str, str, int], task: "asyncio.Task[None]") -> None:
        del self._running[of]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waits is told. Of a check the next one, at twice the age, makes up for this one.
            level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
            log.log(level, "what was used of %s is not known: %s", of[1], error)

    async def _bring(self, tenant_id: str, limit: Limit, since: int) -> None:
        owed, known = (0.0, 0) if self._past is None else await self._used(self._past, tenant_id, limit, since)
        await self._script(tenant_id, "recall", limit.field, limit.value, since, repr(owed), known)

    async def _used(self, past: Past, tenant_id: str, limit: Limit, since: int) -> tuple[float, int]:
        """Return (usage still owed against the limit, total usage)."""
        until = EPOCH + timedelta(microseconds=since)
        if limit.kind == "b":
            month = until.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
            cost = await past.cost(tenant_id, month, until, limit.part)
            return cost, cost
        first = (until - DAY).replace(minute=0, second=0, microsecond=0)
        hours = await past.tokens_by_hour(tenant_id, first, until, limit.part)
        return owed_tokens(hours, limit.value, until), sum(tokens for _, tokens in hours)


def owed_tokens(hours: Sequence[tuple[datetime, int]], limit: int, until: datetime) -> float:
    """What is not paid off yet at `until` of the tokens of those hours, where `limit` a day are.

    As if all of an hour had been taken at its end, or at `until`: never too little, too much by an hour's worth.
    """
    owed, at = 0.0, EPOCH
    for start, tokens in hours:
        end = min(start + HOUR, until)
        owed = max(0.0, owed - (end - at) / DAY * limit) + tokens
        at = end
    return max(0.0, owed - (until - at) / DAY * limit)
