"""Shared capacity of bytes or places with a maximum share for each owner."""

from collections import Counter


class SharedCapacity:
    """Capacity of `total` units. share: the maximum for one owner, by default half of `total`."""

    def __init__(self, total: int, share: int | None = None) -> None:
        self.total = total
        self.share = total // 2 if share is None else share
        self.held = 0
        self._held_by: Counter[str] = Counter()

    def has_room(self, owner: str, more: int, *, leaves_room: bool) -> bool:
        """Return whether an owner may hold `more` units in addition.

        leaves_room: it may hold at most as much as remains free. Owners that fill the capacity thus leave room for
        others: the first may hold a half, the second a quarter, the third an eighth.
        """
        after, free = self._held_by[owner] + more, self.total - self.held - more
        return free >= 0 and after <= self.share and not (leaves_room and after > free)

    def held_by(self, owner: str) -> int:
        return self._held_by[owner]

    def change(self, owner: str, more: int) -> None:
        """Add `more` units to the owner's; a negative number releases units."""
        self.held += more
        self._held_by[owner] += more
        if not self._held_by[owner]:
            del self._held_by[owner]

    def largest_holder(self) -> str | None:
        return self._held_by.most_common(1)[0][0] if self._held_by else None
