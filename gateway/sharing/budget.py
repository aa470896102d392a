"""A common budget, of bytes or places, of which one owner gets a share at most."""

from collections import Counter


class Budget:
    """Knows how much each owner holds. share: the most for one owner, half of `total` by default.

    leaves_room: an owner may hold no more than it leaves free. So owners that fill it together leave some to others:
    two of them a quarter, of which a third one may have half.
    """

    def __init__(self, total: int, share: int | None = None, *, leaves_room: bool = False) -> None:
        self.total = total
        self._leaves_room = leaves_room
        self.share = total // 2 if share is None else share
        self.held = 0
        self._held_by: Counter[str] = Counter()

    def has_room(self, owner: str, more: int) -> bool:
        """Return whether an owner may hold `more` than it does."""
        after, free = self._held_by[owner] + more, self.total - self.held - more
        return free >= 0 and after <= self.share and not (self._leaves_room and after > free)

    def change(self, owner: str, more: int) -> None:
        """Add to what an owner holds; below 0: give back."""
        self.held += more
        self._held_by[owner] += more
        if not self._held_by[owner]:
            del self._held_by[owner]

    def largest_holder(self) -> str | None:
        return self._held_by.most_common(1)[0][0] if self._held_by else None
