"""Which engine serves a request: one that holds its adapter, then the least busy."""

from collections.abc import Collection

from gateway.errors import Unavailable
from gateway.fleet.registry import EngineRecord, Registry

# How much busier (in our own requests in flight) an engine that holds the adapter may be before another loads it too:
# a load costs milliseconds, a queue costs seconds.
LOCALITY_SLACK = 16


def choose(registry: Registry, digest: str | None, tried: Collection[EngineRecord] = ()) -> EngineRecord:
    """The engine for a request of adapter `digest` (None: the base model). Raises Unavailable if none is left."""
    engines = [engine for engine in registry.healthy if engine not in tried]
    if not engines:
        raise Unavailable("No engine is available to serve this request; try again shortly.", code="no_engine")
    least = min(engine.in_flight for engine in engines)

    def order(engine: EngineRecord) -> tuple[bool, int]:
        local = digest in engine.resident and engine.in_flight <= least + LOCALITY_SLACK
        return (not local, engine.in_flight)

    return min(engines, key=order)
