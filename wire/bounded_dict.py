"""Dictionary with a limit of entries."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """Dictionary that keeps the `limit` entries that were put last, the oldest first. Reading changes no order."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def put(self, key: K, value: V) -> None:
        """Add or replace an entry. It becomes the newest; the oldest leaves a full dictionary."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)
