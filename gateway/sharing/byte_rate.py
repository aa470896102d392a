"""Rate of bytes by owner, such as a tenant: all that is received for one owner shares its rate."""

import time

from wire.bounded_dict import BoundedDict

MAX_OWNERS = 1000


class ByteRate:
    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_each = 1 / bytes_per_second
        # Owner -> time (monotonic) at which its next piece may be received, least recently used first.
        self._next = BoundedDict[str, float](MAX_OWNERS)

    def delay(self, owner: str, size: int) -> float:
        """Count a received piece. Return the seconds until the next piece of the same connection may be received."""
        now = time.monotonic()
        self._next.put(owner, max(now, self._next.get(owner, 0.0)) + size * self._seconds_each)
        return self._next[owner] - now
