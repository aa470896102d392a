"""Removal of the limits of ended keys from Redis.

Nothing renews a family of keys whose last key was revoked, has expired or was deleted, so no request uses its limits
again. The script keeps a field while a running request uses it, and a minute's rate until it is paid off. Budgets and
limits of a day may be dropped at any time, because the ledger has their usage: if a gateway with an older cache still
admits a request, they are backfilled.
"""

import asyncio
import logging
import random
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol

from gateway.errors import Unavailable
from gateway.quota.store import QuotaStore
from gateway.redis import sweeps
from gateway.redis.client import Client
from gateway.redis.keys import LIMITS_REMOVER_KEY, limits_key

log = logging.getLogger(__name__)

# The jitter has its own generator, so that it never changes the state of Python's shared one.
JITTER = random.Random()

# Interval of the removals.
EVERY_SECONDS = 30.0
# Age of a key's end: longer than any gateway trusts a cached key, and than a minute's rate takes to be paid off.
ENDED_SECONDS = 120
# Number of fields from which a tenant's state is read in each removal. Each removal also reads IN_TURN of the other
# tenants.
MANY_FIELDS = 1000
IN_TURN = 100
# Fields of one reply, approximately, and the pause after it.
SCAN = 500
PAUSE_SECONDS = 0.005
# Most families in one query.
MAX_FAMILIES = 500


class KeyRecords(Protocol):
    """Keys on record, implemented by `gateway.records.past_usage.PastUsage`. Raises Unavailable."""

    async def valid_families(self, tenant_id: str, families: Collection[str], since: datetime) -> set[str]: ...


class EndedKeys:
    """Removal of the limits of ended keys, by one process at a time."""

    def __init__(self, redis: Client, store: QuotaStore, records: KeyRecords) -> None:
        self._redis = redis
        self._store = store
        self._records = records
        # The last tenant that was read in turn.
        self._last = ""

    async def run(self) -> None:
        """Remove limits periodically until cancelled. Run it as a task."""
        while True:
            # Jitter, so that no process always gets the turn.
            await asyncio.sleep(EVERY_SECONDS * JITTER.uniform(0.75, 1.25))
            try:
                if await self._store.call(lambda: sweeps.is_first(self._redis, LIMITS_REMOVER_KEY, EVERY_SECONDS / 2)):
                    await self.remove_all()
            except Unavailable as error:
                # The part that is away logs its own outage.
                log.debug("limits of ended keys are not removed yet: %s", error)
            except Exception:
                # A bug must not end the task, whose group extends the leases.
                log.exception("removing limits of ended keys failed; the gateway retries")

    async def remove_all(self) -> None:
        """Remove the ended keys' limits of all tenants with many fields, and of some others. Raises Unavailable."""
        small: list[str] = []
        cursor, is_begun = 0, False
        while cursor or not is_begun:
            is_begun = True
            cursor, tenants = await self._store.call(partial(sweeps.page, self._redis, cursor))
            lengths = await self._store.call(partial(self._lengths, list(tenants)))
            for tenant_id, length in zip(tenants, lengths, strict=True):
                if isinstance(length, int) and length >= MANY_FIELDS:
                    await self._try_remove(tenant_id)
                elif length:
                    small.append(tenant_id)
        small.sort()
        in_turn = [each for each in small if each > self._last][:IN_TURN] or small[:IN_TURN]
        for tenant_id in in_turn:
            await self._try_remove(tenant_id)
        self._last = in_turn[-1] if in_turn else ""

    async def _try_remove(self, tenant_id: str) -> None:
        """Remove a tenant's fields. An error of one tenant does not stop the others. Raises Unavailable."""
        try:
            await self.remove(tenant_id)
        except Unavailable as error:
            if self._store.away:
                raise
            log.error("limits of ended keys of tenant %s are not removed: %s", tenant_id, error.__cause__ or error)

    async def remove(self, tenant_id: str) -> int:
        """Remove the limits of a tenant's ended keys. Return the number of removed fields. Raises Unavailable."""
        removed, cursor, is_begun = 0, 0, False
        while cursor or not is_begun:
            is_begun = True
            cursor, found = await self._store.call(partial(self._page, tenant_id, cursor))
            if ended := await self._ended(tenant_id, found):
                removed += await self._store.script(tenant_id, "forget", *ended)
            await asyncio.sleep(PAUSE_SECONDS)
        return removed

    async def _ended(self, tenant_id: str, fields: Sequence[str]) -> list[str]:
        """Return those of the fields whose keys have ended."""
        families = sorted({_family(field) for field in fields})
        since, valid = datetime.now(UTC) - timedelta(seconds=ENDED_SECONDS), set[str]()
        for first in range(0, len(families), MAX_FAMILIES):
            valid |= await self._records.valid_families(tenant_id, families[first : first + MAX_FAMILIES], since)
        return [field for field in fields if _family(field) not in valid]

    async def _lengths(self, tenant_ids: Sequence[str]) -> list[int | Exception]:
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id in tenant_ids:
            pipeline.hlen(limits_key(tenant_id))
        return await pipeline.execute(raise_on_error=False)

    async def _page(self, tenant_id: str, cursor: int) -> tuple[int, list[str]]:
        """Return the next cursor (0 at the end) and the fields of keys' limits on a page."""
        answer: Any = await self._redis.hscan(limits_key(tenant_id), cursor, match="key:*", count=SCAN)
        following, found = answer
        return int(following), [field.decode() for field in found]


def _family(field: str) -> str:
    """Return the family of a field such as `key:<family>:t#`."""
    return field.split(":")[1]
