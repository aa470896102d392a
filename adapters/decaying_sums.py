"""Sums per owner that decay with a half-life: each owner's recent amount of seconds, bytes or another unit."""

import time

# Smaller sums are dropped, in any unit, so that only recent owners use memory.
FORGOTTEN = 0.001


class DecayingSums:
    """Decaying sums of amounts in one unit, such as seconds or bytes, per owner. Not thread-safe."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        # The sum and the time at which it had this value; it decays from there.
        self._sums: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, owner: str, amount: float) -> None:
        """Add to the owner's sum, and drop owners whose sums have decayed to nothing."""
        now = time.monotonic()
        self._sums[owner] = self._at(owner, now) + amount, now
        for idle in [owner for owner in self._sums if self._at(owner, now) < FORGOTTEN]:
            del self._sums[idle]

    def of(self, owner: str) -> float:
        """Return the owner's sum, decayed to now."""
        return self._at(owner, time.monotonic())

    def _at(self, owner: str, now: float) -> float:
        amount, at = self._sums.get(owner, (0.0, now))
        return float(amount * 0.5 ** ((now - at) / self._half_life_s))
