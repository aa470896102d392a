"""Bytes of uploads, held and charged like the tokens of requests."""

from collections.abc import Sequence

import msgspec

from gateway.quota.demand import Demand
from gateway.quota.growing_hold import Hold
from gateway.quota.limits import Limit

# Bytes that an upload of unknown size holds at first. Its hold grows by half of the bytes received.
FIRST_BYTES = 8 << 20


class UploadSize(msgspec.Struct, frozen=True, gc=False):
    """Size of an upload. num_bytes: the size, or the largest possible one if it is unknown."""

    num_bytes: int = 0
    is_known: bool = True

    def demand(self, tenant_id: str, request_id: str, limits: Sequence[Limit]) -> Demand:
        """Return the demand of the upload's bytes.

        limits: those that apply to it. An upload that is larger than the whole limit holds all of it. Its other bytes
        are charged at its end.
        """
        most = min([self.num_bytes, *(limit.value for limit in limits if limit.kind.takes == "bytes")])
        return Demand(
            tenant_id=tenant_id,
            request_id=request_id,
            max_tokens=most,
            step=max(1, most),
            expected=None if self.is_known else FIRST_BYTES,
        )


# Size of a change of adapters without an upload.
NO_BYTES = UploadSize()


class ReceivedBytes:
    """Counter of an upload's bytes. Bytes count when they arrive, whatever becomes of the upload."""

    def __init__(self, owner: str | None = None, hold: Hold | None = None) -> None:
        """owner: the tenant's id; None for an operator's upload. hold: grows with the bytes; None if their size was
        known and is held, or is not limited.
        """
        self.owner = owner
        self.total = 0
        self._hold = hold

    def count(self, more: int) -> None:
        """Count bytes of a copy on a thread. They are charged at the upload's end."""
        self.total += more

    async def add(self, more: int) -> None:
        """Count bytes. Raises RateLimited if the limit has no more room."""
        self.count(more)
        if self._hold is not None:
            self._hold.use(self.total)
            if self._hold.pace.is_used_up:
                await self._hold.cover()
