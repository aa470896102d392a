"""Cache of answers for tenants, in which a tenant displaces other tenants' entries only up to a part of the room."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TenantCache(Generic[K, V]):
    """Entries by tenant's id and key. most: limit of entries. most_each: limit of one tenant's entries."""

    def __init__(self, most: int, most_each: int) -> None:
        self._most, self._most_each = most, most_each
        # Tenants and their entries; the longest unchanged first.
        self._tenants: OrderedDict[str, OrderedDict[K, V]] = OrderedDict()
        self._count = 0

    def get(self, tenant_id: str, key: K) -> V | None:
        entries = self._tenants.get(tenant_id)
        return None if entries is None else entries.get(key)

    def put(self, tenant_id: str, key: K, value: V) -> None:
        """Add or replace an entry. A full tenant loses its own oldest entry; a full cache loses the oldest entry of the
        least recently changed tenant.
        """
        entries = self._tenants.setdefault(tenant_id, OrderedDict())
        self._tenants.move_to_end(tenant_id)
        self._count += key not in entries
        entries[key] = value
        entries.move_to_end(key)
        if len(entries) > self._most_each:
            self._remove_oldest(tenant_id)
        elif self._count > self._most:
            self._remove_oldest(next(iter(self._tenants)))

    def _remove_oldest(self, tenant_id: str) -> None:
        entries = self._tenants[tenant_id]
        entries.popitem(last=False)
        self._count -= 1
        if not entries:
            del self._tenants[tenant_id]
