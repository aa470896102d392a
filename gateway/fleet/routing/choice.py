"""Choice of a request's engine: the one with the earliest first token, estimated from its queue and adapters.

Rendezvous hashing (Thaler and Ravishankar 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), where the
bound is a time. Each adapter has an order of engines, the same on every gateway, which decides among engines that are
about equally good. An engine that holds the adapter is ahead by the time of an adapter load, until its queue takes
longer than that; then another engine loads a copy.

In a fleet beyond `EXACT` engines, `candidates.py` compares some of them; `choose` here is its slow twin.

The first engines in the order are the adapter's homes, one for each HOME_BATCHES batches of its requests. A further
home loads a copy before the others have a queue, because many requests share the cost of its load. The first engine in
the order gets all of them again when there are fewer requests, and the unused copies are evicted.
`benchmarks/routing.py` compares this with other methods.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from gateway.fleet.engines.engine import MIN_LOAD_SECONDS, EngineRecord
from wire.bounded_dict import BoundedDict

# The share by which a full batch prolongs each of its requests: the price of joining the busier of two engines that
# both have a free place.
CROWDING = 0.05
# Cost of one load, in loads: it also evicts another adapter, which must be loaded again later.
ADAPTER_LOAD_COST = 2.0
# Engines' loads are compared in quarters of a batch. Within a quarter, the conversation and the adapter's order decide.
LEVELS = 4
# Requests of one adapter, in batches of an engine, for which one home is enough.
HOME_BATCHES = 0.7
# Time in which a home's requests share the cost of its load.
HOME_SECONDS = 10.0
# Time constant of the adapters' rates. With 2 s, an adapter with 60 % of all requests was on three engines after 5.8 s.
RATE_SECONDS = 1.0
MAX_RATES = 50_000
# Maximum factor between this process's requests and those of all gateways.
MAX_FLEET_TO_OWN = 64
# Leading characters, or tokens, of a prompt that identify its conversation, and leading parts of a message.
PREFIX_CHARS = 1024
PREFIX_PARTS = 8
MAX_PREFIXES = 50_000
# Prompt tokens from which an activated LoRA's request goes to the engine that served the base model's turn.
LONG_PROMPT = 256


class RoutedRequest(NamedTuple):
    """A request to choose an engine for.

    digest: the adapter's; None: the base model. prefix: the conversation's key, from `prefix_key`. cached: the engine
    that served the conversation last. rate: the adapter's requests per second in this process. reuses_base: whether
    the adapter reads the base model's cached blocks of a long prompt (activated LoRA), which are worth a load.
    sequences: number of its sequences.
    """

    digest: str | None
    prefix: bytes = b""
    cached: EngineRecord | None = None
    rate: float = 0.0
    reuses_base: bool = False
    sequences: int = 1

    @property
    def affinity(self) -> bytes:
        """Return the key by which equal engines are ordered."""
        return self.digest.encode() if self.digest is not None else self.prefix


class Homes(NamedTuple):
    """Homes of an adapter. engines: those among the compared engines, in its order. number: the number of all homes."""

    engines: Sequence[EngineRecord] = ()
    number: int = 0


class Choice(NamedTuple):
    """A request's engine, and the homes that should load its adapter before requests come there."""

    engine: EngineRecord
    homes: Sequence[EngineRecord]


def choose(engines: Iterable[EngineRecord], request: RoutedRequest) -> Choice | None:
    """Return the choice among all engines, None if none is available. In a large fleet, `candidates.py` compares some.

    An engine whose device is full of other adapters with requests is no home, so no engine gets more hot adapters than
    fit on its device.
    """
    key = request.affinity
    ordered = sorted((engine for engine in engines if engine.available), key=lambda engine: rank(key, engine.url))
    if not ordered:
        return None
    homes = Homes()
    if request.digest is not None and (number := number_of_homes(request.digest, ordered, request.rate)) > 1:
        roomy = [engine for engine in ordered if engine.has_room_for(request.digest)]
        homes = Homes(roomy[:number], len(roomy[:number]))
    return Choice(earliest(ordered, request, homes), homes.engines)


def earliest(ordered: Sequence[EngineRecord], request: RoutedRequest, homes: Homes) -> EngineRecord:
    """Return the engine with the earliest first token.

    ordered: at least one engine, all of them available, in the order that decides among equal ones.
    """
    if len(ordered) == 1:
        return ordered[0]
    # Means over the engines: their own measurements differ a little, which must not decide every choice.
    request_seconds = sum(engine.request_seconds for engine in ordered) / len(ordered)
    load_seconds = sum(engine.load_seconds for engine in ordered) / len(ordered)

    def order(engine: EngineRecord) -> tuple[int, float, bool]:
        seconds = seconds_in_queue(engine) + CROWDING * level(engine) * request_seconds
        seconds += adapter_seconds(engine, request, homes, request_seconds, load_seconds)
        return engine.fullness(request.sequences), seconds, engine is not request.cached

    return min(ordered, key=order)


def adapter_seconds(
    engine: EngineRecord, request: RoutedRequest, homes: Homes, request_seconds: float, load_seconds: float
) -> float:
    """Return the seconds that the request's adapter adds on the engine. The last two arguments are means of engines."""
    digest, seconds = request.digest, 0.0
    if request.reuses_base and engine is request.cached:
        seconds -= load_seconds
    elif digest is None or engine.holds(digest):
        pass
    elif engine.prefetched.has(digest):
        # Only the copy to the device remains.
        seconds += MIN_LOAD_SECONDS
    else:
        # A home's load serves its part of the adapter's next requests.
        served = max(1.0, request.rate * HOME_SECONDS / homes.number) if engine in homes.engines else 1.0
        # An engine loads one adapter after another.
        seconds += ADAPTER_LOAD_COST * load_seconds / served + len(engine.requests.loading) * load_seconds
    if digest is not None and not engine.has_room_for(digest):
        # The load waits until all requests of another adapter have ended.
        seconds += request_seconds
    return seconds


def number_of_homes(digest: str, engines: Sequence[EngineRecord], rate: float) -> int:
    """Return the number of engines that an adapter's requests should use. engines: all available ones."""
    own = sum(engine.requests.sequences for engine in engines)
    fleet_to_own = sum(engine.load for engine in engines) / own if own else 1.0
    in_progress = sum(engine.requests.by_digest[digest] for engine in engines)
    slots = sum(engine.slots for engine in engines) / len(engines)
    return min(len(engines), homes_needed(in_progress, rate, fleet_to_own, slots))


def homes_needed(in_progress: int, rate: float, fleet_to_own: float, slots: float) -> int:
    """Return the number of homes for an adapter's requests.

    It follows from the requests in progress and those of the next RATE_SECONDS, without the one that is placed now: a
    single request makes no adapter popular, however long requests take. Other gateways are assumed to have the same
    share of this adapter's requests as of all requests.

    in_progress, rate: the adapter's requests in this process, and per second. fleet_to_own: requests of all processes
    as a multiple of this one's. slots: mean of an engine's.
    """
    requests = max(0.0, in_progress + rate * RATE_SECONDS - 1.0) * min(MAX_FLEET_TO_OWN, fleet_to_own)
    return math.ceil(requests / slots / HOME_BATCHES)


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

    It is made of the tenant, the adapter, and OpenAI's `prompt_cache_key` or, without it, the beginnings of a
    conversation's first two messages or of a prompt. Other fields of a message may have megabytes.
    """
    messages = body.get("messages")
    beginning = [*map(_opening, messages[:2])] if isinstance(messages, list) else body.get("prompt")
    said = body.get("prompt_cache_key") or beginning
    if isinstance(said, msgspec.Raw):
        said = bytes(memoryview(said)[:PREFIX_CHARS])
    elif isinstance(said, str):
        said = said[:PREFIX_CHARS]
    elif isinstance(said, list):
        # Ids of tokens, or one or more prompts.
        has_prompts = any(isinstance(each, str | list) for each in said[:1])
        said = [each[:PREFIX_CHARS] for each in said[:2]] if has_prompts else said[:PREFIX_CHARS]
    return blake2b(msgspec.json.encode([tenant_id, digest, said]), digest_size=16).digest()


def _opening(message: dict[str, Any]) -> list[str | None]:
    """Return a chat message's role and the beginning of its text."""
    content = message.get("content") or ""
    parts = content[:PREFIX_PARTS] if isinstance(content, list) else ({"text": content},)
    return [message.get("role"), *((part.get("text") or "")[:PREFIX_CHARS] for part in parts)]


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


class Conversations:
    """The last engine of each of the MAX_PREFIXES newest conversations."""

    def __init__(self) -> None:
        self._engines = BoundedDict[bytes, EngineRecord](MAX_PREFIXES)

    def engine(self, prefix: bytes) -> EngineRecord | None:
        """Return the conversation's last engine, which may no longer be available."""
        return self._engines.get(prefix)

    def served(self, prefix: bytes, engine: EngineRecord) -> None:
        self._engines.put(prefix, engine)
