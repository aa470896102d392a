"""Nearness of waiting requests: whether their adapter and their prompt's first blocks are on the device."""

from collections.abc import Set
from dataclasses import dataclass

from adapters.tiers.device_pool import AdapterPool
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Nearness:
    """Nearness by the adapters that are on the device and the blocks that are in the prefix cache."""

    adapters: AdapterPool
    cache: KVCache

    def is_far(self, request: Request) -> bool:
        adapter = request.adapter_digest
        return adapter is not None and not self.adapters.is_resident(adapter)

    def key(self, request: Request) -> tuple[bool, bool]:
        return (True, True) if self.is_far(request) else (False, not self.cache.has_start(request))

    def near_among(self, adapters: Set[str | None]) -> list[str | None]:
        near: list[str | None] = [*self.adapters.resident_among(adapters)]
        return [None, *near] if None in adapters else near
