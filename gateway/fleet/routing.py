"""Which engine serves a request: the one where its first token is soonest, by what is known of queue and adapters.

Rendezvous hashing (Thaler and Ravishankar 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), the bound
being time: each adapter has an order of engines, the same on every gateway, that decides among those that are about as
good. Who holds the adapter is better by the time a load takes, until its queue takes longer than that; then another
loads a copy. As the load falls the first in the order takes all again, and the copy, unused, is evicted there.
`benchmarks/routing.py` measures it against other ways.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.fleet.registry import EngineRecord

# What a full batch adds to each of its requests' time, of the whole: the price of joining the busier of two engines
# that both have a place free.
CROWDING = 0.05
# A load takes a place from another adapter, which will have to be loaded again.
LOADS_PER_LOAD = 2.0
# Loads are compared in quarters of a batch: within one, the conversation and the adapter's order decide.
LEVELS = 4
# Characters, or tokens, of a prompt that say which conversation it belongs to.
PREFIX_CHARS = 1024
MAX_PREFIXES = 50_000


def choose(
    engines: Iterable[EngineRecord], digest: str | None, prefix: bytes = b"", cached: EngineRecord | None = None
) -> EngineRecord | None:
    """The engine for a request of adapter `digest` (None: the base model), None if there is none available.

    prefix: what conversation it is of, from `prefix_key`. cached: the engine that served that conversation last.
    """
    candidates = [engine for engine in engines if engine.available]
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    affinity = digest.encode() if digest is not None else prefix
    # The fleet's means: what was measured of one engine and another differs a little, and must not decide for all.
    request_seconds = sum(engine.request_seconds for engine in candidates) / len(candidates)
    load_seconds = sum(engine.load_seconds for engine in candidates) / len(candidates)

    def order(engine: EngineRecord) -> tuple[bool, float, bool, bytes]:
        seconds = seconds_in_queue(engine) + CROWDING * level(engine) * request_seconds
        if digest is not None and not engine.holds(digest):
            seconds += LOADS_PER_LOAD * load_seconds
        return engine.load >= engine.limit, seconds, engine is not cached, rank(affinity, engine.url)

    return min(candidates, key=order)


def seconds_in_queue(engine: EngineRecord) -> float:
    """How long a new request waits for a place in the engine's batch, places falling free evenly."""
    return max(0, engine.load + 1 - engine.slots) * engine.request_seconds / engine.slots


def level(engine: EngineRecord) -> float:
    """The engine's load in batches, rounded down to a level."""
    return LEVELS * engine.load // engine.slots / LEVELS


def rank(key: bytes, url: str) -> bytes:
    """The place of an engine in a key's order: the same everywhere, and moved by no other engine's coming or going."""
    return blake2b(url.encode(), key=key[:64], digest_size=8).digest()


def prefix_key(tenant_id: str, digest: str | None, body: dict[str, Any]) -> bytes:
    """What requests have in common that share cached prompt blocks: the tenant, the adapter, and OpenAI's
    `prompt_cache_key` or, without it, a conversation's first two messages or a prompt's beginning."""
    messages = body.get("messages")
    beginning = messages[:2] if isinstance(messages, list) else body.get("prompt")
    said = body.get("prompt_cache_key") or beginning
    if isinstance(said, str | list):
        said = said[:PREFIX_CHARS]
    return blake2b(msgspec.json.encode([tenant_id, digest, said]), digest_size=16).digest()


class Conversations:
    """Which engine served a conversation last, of the MAX_PREFIXES newest."""

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
