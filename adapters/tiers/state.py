"""Snapshot of the two tiers' counters, for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LoadResult = Literal["loaded", "refused", "missing", "failed"]
"""End of a load into host memory: refused is the adapter's fault, failed the store's or the machine's."""
EvictionReason = Literal["room", "unloaded", "copy_failed"]
EVICTION_REASONS: tuple[EvictionReason, ...] = ("room", "unloaded", "copy_failed")


@dataclass(frozen=True, slots=True)
class HostCacheStats:
    num_adapters: int
    num_bytes: int
    max_bytes: int
    loads: int
    evictions: int


@dataclass(frozen=True, slots=True)
class TierState:
    """Counters of both tiers.

    pages: device pages by state: `in_use` by running requests, `new` (copied, or being copied, and not used yet),
    `idle`, `free`. reserved_pages: pages for which adapters wait. page_waits, page_wait_seconds: reservations that were
    placed, and the sum of their waits. evictions: number of evictions from the device, by reason. host: the host tier's
    counters.
    """

    pages: Mapping[str, int]
    reserved_pages: int
    page_waits: int
    page_wait_seconds: float
    evictions: Mapping[EvictionReason, int]
    host: HostCacheStats
