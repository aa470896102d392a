"""Choice of an engine in a fleet of any size. Up to EXACT engines, it compares all of them (`choice.choose`).

In a larger fleet, a choice compares a bounded number of candidates, so that its cost does not grow with the fleet: the
first usable engines in the order of the adapter or conversation (`ring.py`), some that hold the adapter, the
conversation's last engine, and a few random ones, because the better of several random engines is seldom a busy one
(Mitzenmacher 2001). An adapter with more than NEAR homes has NEAR random ones of them among the candidates.

`tests/gateway/fleet/routing/test_candidates.py` compares the choice with that among all engines.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from gateway.fleet.discovery.base_engines import BaseEngines
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.routing.choice import Choice, Homes, RoutedRequest, choose, earliest, homes_needed, rank

# Candidates: first usable engines of the order, engines that hold the adapter, random engines.
NEAR, HOLDING, RANDOM = 10, 3, 2
# Engines at the beginning of the order among which a usable one is searched. Without one, all engines are searched.
FAR = 48
# Candidates of that search.
MAX_FOUND = 32

Usable = Callable[[EngineRecord], bool]


def choose_in(fleet: BaseEngines, request: RoutedRequest, in_progress: int, usable: Usable) -> Choice | None:
    """Return the choice for a request, None if no usable engine is available.

    in_progress: this process's requests of the adapter. usable: returns whether the request may go to an engine.
    """
    if not fleet.is_large:
        return choose([engine for engine in fleet.engines if usable(engine)], request)

    def fits(engine: EngineRecord) -> bool:
        return engine.available and usable(engine)

    near, homes = list(islice(filter(fits, islice(fleet.ring.order(request.affinity), FAR)), NEAR)), Homes()
    if request.digest is not None:
        needed = homes_needed(in_progress, request.rate, fleet.fleet_to_own, fleet.slots)
        homes = _homes(fleet, request.digest, needed, near, fits)
    # An adapter with many homes has some of them as candidates instead of its first engines.
    candidates = dict.fromkeys(homes.engines if homes.number > NEAR else near)
    candidates.update(dict.fromkeys(filter(fits, _elsewhere(fleet, request))))
    if not candidates:
        found = list(filter(fits, fleet.engines))
        return choose(random.sample(found, min(len(found), MAX_FOUND)), request)
    return Choice(earliest(list(candidates), request, homes), homes.engines)


def engines_for(fleet: BaseEngines, digest: str, rate: float, fits: Usable) -> list[EngineRecord]:
    """Return the adapter's homes among the engines that fit, or the first of its order if it needs none.

    rate: as in `RoutedRequest`.
    """
    in_progress = sum(engine.requests.by_digest[digest] for engine in fleet.engines)
    needed = homes_needed(in_progress, rate, fleet.fleet_to_own, fleet.slots)
    key = digest.encode()
    order = fleet.ring.order(key) if fleet.is_large else sorted(fleet.engines, key=lambda each: rank(key, each.url))
    return list(islice(filter(fits, order), max(1, needed)))


def _homes(fleet: BaseEngines, digest: str, needed: int, near: Sequence[EngineRecord], fits: Usable) -> Homes:
    """Return the adapter's homes, at most NEAR random ones of them.

    needed: number of homes for its requests. near: the first usable engines of its order.
    """
    if needed <= 1:
        return Homes()
    if needed <= NEAR:
        roomy = [engine for engine in near if engine.has_room_for(digest)][:needed]
        return Homes(roomy, len(roomy))
    # Engines that are not available take none of the requests.
    number = min(len(fleet.engines), needed * len(fleet.engines) // max(1, len(fleet.available)))
    some = random.sample(list(islice(fleet.ring.order(digest.encode()), number)), NEAR)
    return Homes([engine for engine in some if fits(engine) and engine.has_room_for(digest)], needed)


def _elsewhere(fleet: BaseEngines, request: RoutedRequest) -> Iterator[EngineRecord]:
    """Generate the candidates that do not depend on the order."""
    if request.cached is not None:
        yield request.cached
    if request.digest is not None:
        holders = fleet.holders(request.digest)
        yield from holders if len(holders) <= HOLDING else random.sample(holders, HOLDING)
    yield from random.choices(fleet.engines, k=RANDOM)
