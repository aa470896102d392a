"""Engines of one base model, with the sums over them that requests need.

Up to EXACT engines, the registry makes a new `BaseEngines` for each use, so nothing is older than the records. Beyond,
it keeps one for MAX_AGE: a pass over 1,000 engines takes 1 ms, and a gateway process has 640 requests a second there.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from gateway.fleet.discovery.ring import Ring
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.queueing.queue import Capacity, Room, kept_free

# Number of engines up to which each choice compares all of them.
EXACT = 32
# Age of the sums in a larger fleet, in seconds: the interval of the engines' own reports.
MAX_AGE = 0.05
# Age of `holders`, in seconds. They only suggest engines; the choice looks at the engines' own lists.
HOLDERS_AGE = 1.0


class BaseEngines:
    """Engines of one base model. Each sum is computed at its first use.

    former: the instance before this one, whose ring and holders are used again if they are still right.
    """

    def __init__(
        self,
        engines: Sequence[EngineRecord],
        former: "BaseEngines | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engines = engines
        self.made = clock()
        self._former_ring: Ring | None = None
        if former is not None:
            self._former_ring = former.__dict__.get("ring", former._former_ring)
        self._holders: tuple[float, Mapping[str, Sequence[EngineRecord]]] | None = None
        if former is not None and former._holders is not None and self.made - former._holders[0] < HOLDERS_AGE:
            self._holders = former._holders

    @property
    def is_large(self) -> bool:
        """Return whether a choice compares only some of the engines."""
        return len(self.engines) > EXACT

    @cached_property
    def available(self) -> Sequence[EngineRecord]:
        return [engine for engine in self.engines if engine.available]

    @cached_property
    def capacity(self) -> Capacity | None:
        """Return the capacity of the available engines, or None without one, so that requests fail without a wait."""
        return capacity_of(self.available)

    @cached_property
    def keeps_allowances(self) -> bool:
        """Return whether every engine that is up limits requests by an allowance."""
        return all(engine.keeps_allowances for engine in self.engines if engine.is_up)

    @cached_property
    def activated(self) -> frozenset[str]:
        """Return the digests of the activated LoRAs, as far as engines that hold them have reported them."""
        return frozenset().union(*(engine.state.adapters_activated for engine in self.engines))

    @cached_property
    def digests(self) -> frozenset[str | None]:
        """Return the digests of the weights of the available engines; None if one of them reports none."""
        return frozenset(engine.state.base_digest for engine in self.available)

    @cached_property
    def slots(self) -> float:
        """Return the mean number of slots of an available engine; 1 without one."""
        return sum(engine.slots for engine in self.available) / len(self.available) if self.available else 1.0

    @cached_property
    def fleet_to_own(self) -> float:
        """Return the sequences of all gateway processes as a multiple of this process's."""
        own = sum(engine.requests.sequences for engine in self.available)
        return sum(engine.load for engine in self.available) / own if own else 1.0

    def kept_free(self, sequences: int) -> EngineRecord | None:
        """Return the engine that the queue keeps free for a request; None without one that takes it."""
        index = kept_free(rooms_of(self.available), sequences)
        return None if index is None else self.available[index]

    @cached_property
    def ring(self) -> Ring:
        former = self._former_ring
        return former if former is not None and former.engines == self.engines else Ring(self.engines)

    def holders(self, digest: str) -> Sequence[EngineRecord]:
        """Return engines that hold the adapter, as of at most HOLDERS_AGE ago."""
        if self._holders is None:
            found: defaultdict[str, list[EngineRecord]] = defaultdict(list)
            for engine in self.available:
                for held in engine.resident:
                    found[held].append(engine)
            self._holders = self.made, found
        return self._holders[1].get(digest, ())


def capacity_of(available: Sequence[EngineRecord]) -> Capacity | None:
    """Return the capacity of engines, or None without one."""
    if not available:
        return None
    places = sum(engine.max_in_flight for engine in available if engine.address.traits.orders_tenants)
    rooms = () if places else rooms_of(available)
    return Capacity(
        places_for_process=sum(max(0, engine.max_in_flight - engine.other_processes_load) for engine in available),
        ordered_places=places,
        unordered_places=sum(engine.max_in_flight for engine in available) - places,
        max_request=max(engine.max_sequences for engine in available),
        max_request_now=max((min(room) for room in rooms), default=math.inf),
        rooms=rooms,
    )


def rooms_of(engines: Sequence[EngineRecord]) -> tuple[Room, ...]:
    """Return the room of each engine."""
    return tuple(Room(engine.max_in_flight - engine.load, engine.max_sequences) for engine in engines)
