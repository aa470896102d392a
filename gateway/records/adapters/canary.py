"""Choice of a canary: one version of an alias for each user or session, in proportion to the weights.

A user's version is chosen by weighted rendezvous hashing (Thaler and Ravishankar, 1998; weights by -ln(u)/w): each
version gets a number from the user's key, and the smallest wins. So the choice needs no memory and no Redis, every
gateway chooses alike, and a change of weights moves only those users whose new version has gained weight.

Requests without a user take the versions in turn, by the additive sequence of the golden ratio. After n requests of a
process, each share differs from its weight by about log(n) requests at most; a random choice would differ by sqrt(n).
"""

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

GOLDEN = (math.sqrt(5) - 1) / 2


class Weighted(Protocol):
    @property
    def version(self) -> int: ...
    @property
    def weight(self) -> int: ...


W = TypeVar("W", bound=Weighted)


def choose_for(targets: Sequence[W], key: bytes) -> W:
    """Return the key's target. key: names tenant, adapter, alias, and user or session. targets: one or more."""
    return min(targets, key=lambda target: _distance(target, key))


def _distance(target: Weighted, key: bytes) -> float:
    hashed = hashlib.blake2b(b"%d\0%b" % (target.version, key), digest_size=8).digest()
    # Strictly between 0 and 1.
    uniform = (int.from_bytes(hashed, "big") + 1) / (2**64 + 2)
    return -math.log(uniform) / target.weight


class InTurn:
    """Choice of targets for requests without a user."""

    def __init__(self) -> None:
        self._at = random.random()

    def choose(self, targets: Sequence[W]) -> W:
        self._at = (self._at + GOLDEN) % 1.0
        left = self._at * sum(target.weight for target in targets)
        for target in targets:
            left -= target.weight
            if left < 0:
                return target
        return targets[-1]
