"""Notes of a tenant's running requests, read from the leases that the quota's script keeps in Redis.

A lease's note is the data with which another gateway settles the request (`gateway/billing/lease_note.py`).
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gateway.redis.keys import leases_key, reservations_key

# Leases that one call reads.
PAGE = 500


class _StoredLease(msgspec.Struct):
    """A lease as the script stores it, of which only the note is read. note: JSON; empty for an upload."""

    note: str = ""


async def read_notes(execute: Callable[..., Awaitable[Any]], tenant_id: str) -> list[dict[str, Any]]:
    """Return the notes of the tenant's open leases (`note` of `Quota.acquire`).

    execute: `QuotaStore.execute`, so that settlements that this process has sent before count.
    """
    # An ended lease has a negative score.
    ids = await execute("ZRANGEBYSCORE", leases_key(tenant_id), 0, "+inf")
    found = []
    for start in range(0, len(ids), PAGE):
        for packed in await execute("HMGET", reservations_key(tenant_id), *ids[start : start + PAGE]):
            note = "" if packed is None else msgspec.msgpack.decode(packed, type=_StoredLease).note
            if note:
                found.append(msgspec.json.decode(note))
    return found
