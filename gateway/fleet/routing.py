"""Choice of a request's engine: the one with the earliest first token, estimated from its queue and adapters.

Rendezvous hashing (Thaler and Ravishankar 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), where the
bound is a time. Each adapter has an order of engines, the same on every gateway, which decides among engines that are
about equally good. An engine that holds the adapter is ahead by the time of an adapter load, until its queue takes
longer than that; then another engine loads a copy.

The first engines in the order are the adapter's homes, one for each HOME_BATCHES batches of its requests. A further
home loads a copy before the others have a queue, because many requests share the cost of its load. When there are fewer
requests, the first engine in the order gets all of them again, and the unused copies are evicted.
`benchmarks/routing.py` compares this with other methods.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.fleet.engine import LEAST_LOAD_SECONDS, EngineRecord
from wire.bounded_dict import BoundedDict

# The share by which a full batch prolongs each of its requests: the price of joining the busier of two engines that
# both have a free place.
CROWDING = 0.05
# Loads that one load costs: it evicts another adapter, which must be loaded again later.
LOADS_PER_LOAD = 2.0
# Engines' loads are compared in quarters of a batch. Within a quarter, the conversation and the adapter's order decide.
LEVELS = 4
# Requests of one adapter, in batches of an engine, for which one home is enough.
HOME_BATCHES = 0.7
# Time in which a home's requests share the cost of its load.
HOME_SECONDS = 10.0
# Time constant of the adapters' rates. With 2 s, an adapter with 60 % of all requests was on three engines after 5.8 s.
RATE_SECONDS = 1.0
MAX_RATES = 50_000
# Factor between this process's requests and those of all gateways, at most.
MAX_PROCESSES = 64
# Leading characters, or tokens, of a prompt that identify its conversation.
PREFIX_CHARS = 1024
MAX_PREFIXES = 50_000
# Prompt tokens from which an activated LoRA's request goes to the engine that served the base model's turn.
LONG_PROMPT = 256


def choose(
    engines: Iterable[EngineRecord],
    digest: str | None,
    prefix: bytes = b"",
    cached: EngineRecord | None = None,
    rate: float = 0.0,
    *,
    reuses_base: bool = False,
) -> EngineRecord | None:
    """Return the engine for a request of adapter `digest` (None: the base model), None if none is available.

    prefix: the conversation's key, from `prefix_key`. cached: the engine that served the conversation last. rate: the
    adapter's requests per second in this process. reuses_base: whether the adapter reads the base model's cached blocks
    of a long prompt (activated LoRA); they are worth a load of the adapter.
    """
    candidates = [engine for engine in engines if engine.available]
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    affinity = digest.encode() if digest is not None else prefix
    # Means over the fleet: the engines' own measurements differ a little, which must not decide every choice.
    request_seconds = sum(engine.request_seconds for engine in candidates) / len(candidates)
    load_seconds = sum(engine.load_seconds for engine in candidates) / len(candidates)
    homes = homes_of(digest, candidates, rate) if digest is not None else ()
    # A home's load serves its part of the adapter's next requests.
    served = max(1.0, rate * HOME_SECONDS / len(homes)) if homes else 1.0

    def order(engine: EngineRecord) -> tuple[int, float, bool, bytes]:
        seconds = seconds_in_queue(engine) + CROWDING * level(engine) * request_seconds
        if reuses_base and engine is cached:
            seconds -= load_seconds
        elif digest is not None and engine.prefetched.has(digest) and not engine.holds(digest):
            # Only the copy to the device remains.
            seconds += LEAST_LOAD_SECONDS
        elif digest is not None and not engine.holds(digest):
            seconds += LOADS_PER_LOAD * load_seconds / (served if engine in homes else 1.0)
            # An engine loads one adapter after another.
            seconds += len(engine.requests.loading) * load_seconds
        if digest is not None and not engine.has_room_for(digest):
            # The load waits until all requests of another adapter have ended.
            seconds += request_seconds
        return engine.fullness, seconds, engine is not cached, rank(affinity, engine.url)

    return min(candidates, key=order)


def homes_of(digest: str, engines: Sequence[EngineRecord], rate: float) -> Sequence[EngineRecord]:
    """Return the engines that should hold the adapter, in its rendezvous order. Empty if one engine is enough.

    An engine whose device is full of other adapters with requests is no home, so no engine gets more hot adapters than
    fit on its device. rate: the adapter's requests per second in this process.
    """
    number = number_of_homes(digest, engines, rate)
    if number <= 1:
        return ()
    roomy = (engine for engine in engines if engine.has_room_for(digest))
    return sorted(roomy, key=lambda engine: rank(digest.encode(), engine.url))[:number]


def number_of_homes(digest: str, engines: Sequence[EngineRecord], rate: float) -> int:
    """Return the number of engines that an adapter's requests should use.

    It follows from the requests in progress and those of the next RATE_SECONDS, without the one that is placed now: a
    single request makes no adapter popular, however long requests take. Other gateways are assumed to have the same
    share of this adapter's requests as of all requests.
    """
    own = sum(engine.requests.in_flight for engine in engines)
    everywhere = min(MAX_PROCESSES, sum(engine.load for engine in engines) / own) if own else 1.0
    in_progress = sum(engine.requests.by_digest[digest] for engine in engines)
    requests = max(0.0, in_progress + rate * RATE_SECONDS - 1.0) * everywhere
    batches = requests * len(engines) / sum(engine.slots for engine in engines)
    return min(len(engines), math.ceil(batches / HOME_BATCHES))


def seconds_in_queue(engine: EngineRecord) -> float:
    """Return how long a new request waits for a place in the engine's batch if places become free evenly."""
    return max(0, engine.load + 1 - engine.slots) * engine.request_seconds / engine.slots


def level(engine: EngineRecord) -> float:
    """Return the engine's load in batches, rounded down to a level."""
    return LEVELS * engine.load // engine.slots / LEVELS


def rank(key: bytes, url: str) -> bytes:
    """Return an engine's position in a key's order: the same everywhere, and independent of other engines."""
    return blake2b(url.encode(), key=key[:64], digest_size=8).digest()


def prefix_key(tenant_id: str, digest: str | None, body: dict[str, Any]) -> bytes:
    """Return a key for requests that share cached prompt blocks.

    It is made of the tenant, the adapter, and OpenAI's `prompt_cache_key` or, without it, a conversation's first two
    messages or a prompt's beginning.
    """
    messages = body.get("messages")
    beginning = messages[:2] if isinstance(messages, list) else body.get("prompt")
    said = body.get("prompt_cache_key") or beginning
    if isinstance(said, str | list):
        said = said[:PREFIX_CHARS]
    return blake2b(msgspec.json.encode([tenant_id, digest, said]), digest_size=16).digest()


class Rates:
    """Recent requests per second of each adapter in this process. Older requests count exponentially less."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The decayed number of requests, and the time at which it had this value; least recently counted first.
        self._counts = BoundedDict[str, tuple[float, float]](MAX_RATES)

    def count(self, digest: str) -> None:
        """Count a request of the adapter."""
        now = self._clock()
        self._counts.put(digest, (self._at(digest, now) + 1.0, now))

    def of(self, digest: str | None) -> float:
        """Return the adapter's rate; 0 for the base model."""
        return self._at(digest, self._clock()) / RATE_SECONDS if digest is not None else 0.0

    def _at(self, digest: str, now: float) -> float:
        count, at = self._counts.get(digest, (0.0, now))
        return count * math.exp((at - now) / RATE_SECONDS)


def is_activated(digest: str | None, engines: Iterable[EngineRecord]) -> bool:
    """Return whether the adapter is an activated LoRA, as far as an engine that holds it has reported."""
    return digest is not None and any(digest in engine.state.adapters_activated for engine in engines)


class Conversations:
    """The last engine of each of the MAX_PREFIXES newest conversations."""

    def __init__(self) -> None:
        self._engines = BoundedDict[bytes, EngineRecord](MAX_PREFIXES)

    def engine(self, prefix: bytes, among: Collection[EngineRecord]) -> EngineRecord | None:
        engine = self._engines.get(prefix)
        return engine if engine in among else None

    def served(self, prefix: bytes, engine: EngineRecord) -> None:
        self._engines.put(prefix, engine)
