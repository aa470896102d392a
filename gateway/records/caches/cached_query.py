"""Answer of a query over all tenants' records, which is cached while no tenant changes.

Such a query costs the database more with every tenant on record. Periodic tasks repeat it through this cache.
"""

import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from gateway.records.caches.changes import RELOAD_SECONDS, Changes

T = TypeVar("T")


class CachedQuery(Generic[T]):
    """Cache of one answer. Each change that affects the answer must be counted in its transaction (`count_change`)."""

    def __init__(self, changes: Changes, query: Callable[[], Awaitable[T]]) -> None:
        self._changes = changes
        self._query = query
        # The answer, `Changes.mark` and the time (monotonic) before its query.
        self._known: tuple[T, int, float] | None = None

    async def get(self) -> T:
        """Return the answer. It is at most as old as the last reading of changes, and RELOAD_SECONDS in any case.

        Raises the query's errors.
        """
        mark, now = self._changes.mark, time.monotonic()
        answer, known_mark, read_at = self._known or (None, -1, -math.inf)
        if answer is None or known_mark != mark or now - read_at > RELOAD_SECONDS:
            answer = await self._query()
            self._known = answer, mark, now
        return answer
