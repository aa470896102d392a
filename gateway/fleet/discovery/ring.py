"""Consistent hashing of keys to engines (Karger et al. 1997): an order of the engines for each key, in a time that does
not grow with their number.

The order is the same in every process. An engine that joins or leaves moves only its own positions in it. The
rendezvous order (`routing.rank`) is more even, but it needs a hash of every engine for each key.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from struct import unpack

from gateway.fleet.engines.engine import EngineRecord

# Positions of an engine on the ring, a multiple of 8. The share of an engine varies by 1/sqrt(POINTS): 18 %.
POINTS = 32
# Low bits of a position, which hold the engine's number, so that positions are sorted as plain integers.
NUMBER_BITS = 20
LAST_NUMBER = (1 << NUMBER_BITS) - 1


class Ring:
    """Ring of engines, fewer than 2**NUMBER_BITS."""

    def __init__(self, engines: Sequence[EngineRecord]) -> None:
        self.engines = engines
        self._points = sorted(point | number for number, engine in enumerate(engines) for point in _points(engine.url))

    def order(self, key: bytes) -> Iterator[EngineRecord]:
        """Generate the engines in the key's order, each once."""
        start = bisect(self._points, int.from_bytes(blake2b(key, digest_size=8).digest()))
        found: set[EngineRecord] = set()
        for place in chain(range(start, len(self._points)), range(start)):
            engine = self.engines[self._points[place] & LAST_NUMBER]
            if engine not in found:
                found.add(engine)
                yield engine


def _points(url: str) -> list[int]:
    found: list[int] = []
    for number in range(POINTS // 8):
        found += unpack("<8Q", blake2b(b"%d %s" % (number, url.encode()), digest_size=64).digest())
    return [point >> NUMBER_BITS << NUMBER_BITS for point in found]
