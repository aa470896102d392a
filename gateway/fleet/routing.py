"""Choice of a request's engine: the one with the earliest first token, estimated from its queue and adapters.

Rendezvous hashing (Thaler and Ravishankar 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), where the
bound is a time. Each adapter has an order of engines, the same on every gateway, which decides among engines that are
about equally good. An engine that holds the adapter is ahead by the time of an adapter load, until its queue takes
longer than that; then another engine loads a copy. When there are fewer requests, the first engine in the order gets
all of them again, and the unused copy is evicted. `benchmarks/routing.py` compares this with other methods.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.fleet.engine import EngineRecord

# The share by which a full batch prolongs each of its requests: the price of joining the busier of two engines that
# both have a free place.
CROWDING = 0.05
# Loads that one load costs: it evicts another adapter, which must be loaded again later.
LOADS_PER_LOAD = 2.0
# Engines' loads are compared in quarters of a batch. Within a quarter, the conversation and the adapter's order decide.
LEVELS = 4
# Leading characters, or tokens, of a prompt that identify its conversation.
PREFIX_CHARS = 1024
MAX_PREFIXES = 50_000


def choose(
    engines: Iterable[EngineRecord], digest: str | None, prefix: bytes = b"", cached: EngineRecord | None = None
) -> EngineRecord | None:
    """Return the engine for a request of adapter `digest` (None: the base model), None if none is available.

    prefix: the conversation's key, from `prefix_key`. cached: the engine that served the conversation last.
    """
    candidates = [engine for engine in engines if engine.available]
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    affinity = digest.encode() if digest is not None else prefix
    # Means over the fleet: the engines' own measurements differ a little, which must not decide every choice.
    request_seconds = sum(engine.request_seconds for engine in candidates) / len(candidates)
    load_seconds = sum(engine.load_seconds for engine in candidates) / len(candidates)

    def order(engine: EngineRecord) -> tuple[int, float, bool, bytes]:
        seconds = seconds_in_queue(engine) + CROWDING * level(engine) * request_seconds
        if digest is not None and not engine.holds(digest):
            seconds += LOADS_PER_LOAD * load_seconds
        return engine.fullness, seconds, engine is not cached, rank(affinity, engine.url)

    return min(candidates, key=order)


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


class Conversations:
    """The last engine of each of the MAX_PREFIXES newest conversations."""

    def __init__(self) -> None:
        self._engines: OrderedDict[bytes, EngineRecord] = OrderedDict()

    def engine(self, prefix: bytes, among: Collection[EngineRecord]) -> EngineRecord | None:
        engine = self._engines.get(prefix)
        return engine if engine in among else None

    def served(self, prefix: bytes, engine: EngineRecord) -> None:
        self._engines[prefix] = engine
        self._engines.move_to_end(prefix)
        if len(self._engines) > MAX_PREFIXES:
            self._engines.popitem(last=False)
