"""Settlements that Redis did not take: kept in this process, and repeated until it takes them."""

import asyncio

from gateway.errors import Unavailable
from gateway.quota.store import QuotaStore

# Pause between two attempts.
RETRY_SECONDS = 2.0


class LateSettlements:
    """Settlements of one gateway process that wait for Redis. store: the quota's, in Redis."""

    def __init__(self, store: QuotaStore) -> None:
        self._store = store
        # Tenant id -> request id -> (tokens, cost, requests) used.
        self._used: dict[str, dict[str, tuple[int, int, int]]] = {}
        self._has_any = asyncio.Event()

    @property
    def tenant_ids(self) -> list[str]:
        """Return the tenants with settlements that wait."""
        return list(self._used)

    def add(self, tenant_id: str, request_id: str, used: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Settle an ended request when Redis answers. used: its tokens, cost and requests."""
        self._used.setdefault(tenant_id, {})[request_id] = used
        self._has_any.set()

    async def keep_settling(self) -> None:
        """Settle whatever waits. Run it as a task."""
        while True:
            await self._has_any.wait()
            self._has_any.clear()
            for tenant_id in self.tenant_ids:
                try:
                    await self._settle(tenant_id)
                except Unavailable:
                    # An error of one tenant's keys does not stop the others.
                    self._has_any.set()
                    if self._store.away:
                        break
            if self._has_any.is_set():
                await asyncio.sleep(RETRY_SECONDS)

    async def _settle(self, tenant_id: str) -> None:
        for request_id, used in list(self._used[tenant_id].items()):
            await self._store.script(tenant_id, "settle", request_id, *used, b"")
            del self._used[tenant_id][request_id]
        if not self._used[tenant_id]:
            del self._used[tenant_id]
