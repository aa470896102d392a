"""Notes of a tenant's running requests, read from the leases and records that the quota's script keeps."""

from typing import Any

import msgspec

# Records that one call reads.
PAGE = 500


class _Record(msgspec.Struct):
    """The part of a record that is needed here. note: JSON, empty for an upload's lease."""

    note: str = ""


async def read_notes(redis: Any, tenant_id: str) -> list[dict[str, Any]]:
    """Return the notes of the leases that have not ended (`lease` of `Quota.acquire`)."""
    tag = f"loraplex:{{{tenant_id}}}:"
    seconds, _ = await redis.time()
    ids = await redis.zrangebyscore(tag + "leases", seconds * 1000, "+inf")
    found = []
    for start in range(0, len(ids), PAGE):
        for packed in await redis.hmget(tag + "held", ids[start : start + PAGE]):
            note = msgspec.msgpack.decode(packed, type=_Record).note if packed is not None else ""
            if note:
                found.append(msgspec.json.decode(note))
    return found
