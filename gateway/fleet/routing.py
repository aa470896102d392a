"""Which engine serves a request: one that holds its adapter, the one that has its prefix cached, the least loaded.

Bounded-load rendezvous hashing (Thaler and Ravishankar 1998; Mirrokni, Thorup and Zadimoghaddam 2018) over an estimate
of the time to the first token. Each adapter has an order of engines, the same on every gateway. A request goes to the
first in it that holds the adapter and is not overloaded; while those that hold it are, to the engine where waiting and
loading take least, which makes a copy. As the load falls the first takes all again, and the copy, unused, is evicted.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.fleet.registry import EngineRecord

# How far above the mean an engine's load may be before another one takes its adapters too.
BALANCE = 1.25
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
    mean = (sum(engine.load / engine.slots for engine in candidates) + 1 / candidates[0].slots) / len(candidates)
    affinity = digest.encode() if digest is not None else prefix

    def order(engine: EngineRecord) -> tuple[bool, bool, bool, float, bool, bytes]:
        held = digest is None or engine.holds(digest)
        # Half a batch is no load to speak of: sending it elsewhere would buy nothing.
        heavy = engine.load + 1 > engine.slots * max(BALANCE * mean, 0.5)
        seconds = seconds_to_start(engine) + (0.0 if held else engine.load_seconds)
        return (
            engine.load >= engine.limit,
            heavy,
            not held,
            seconds if heavy or not held else 0.0,
            engine is not cached,
            rank(affinity, engine.url),
        )

    return min(candidates, key=order)


def seconds_to_start(engine: EngineRecord) -> float:
    """How long a new request waits for a place in the engine's batch, places falling free evenly."""
    return max(0, engine.load + 1 - engine.slots) * engine.request_seconds / engine.slots


def rank(key: bytes, url: str) -> bytes:
    """The place of an engine in a key's order: the same everywhere, and moved by no other engine's coming or going."""
    return blake2b(url.encode(), key=key[:64], digest_size=8).digest()


def prefix_key(tenant_id: str, digest: str | None, body: dict[str, Any]) -> bytes:
    """What requests have in common that share cached prompt blocks: the tenant, the adapter, and OpenAI's
    `prompt_cache_key` or, without it, a conversation's first two messages or a prompt's beginning."""
    said = body.get("prompt_cache_key") or (body.get("messages") or [])[:2] or body.get("prompt") or ""
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
