"""Locality of waiting requests: whether the adapter and the first blocks of the prompt are on the device."""

from collections.abc import Set
from dataclasses import dataclass

from adapters.tiers.device_pool import AdapterPool
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class DeviceLocality:
    """Locality by the adapters that are on the device and the blocks that are in the prefix cache."""

    adapters: AdapterPool
    cache: KVCache

    def lacks_adapter(self, request: Request) -> bool:
        adapter = request.adapter_digest
        return adapter is not None and not self.adapters.is_resident(adapter)

    def key(self, request: Request) -> tuple[bool, bool]:
        return (True, True) if self.lacks_adapter(request) else (False, not self.cache.has_start(request))

    def on_device_among(self, adapters: Set[str | None]) -> list[str | None]:
        resident: list[str | None] = [*self.adapters.resident_among(adapters)]
        return [None, *resident] if None in adapters else resident
