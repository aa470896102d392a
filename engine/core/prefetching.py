"""Loads of adapters into host memory ahead of use: for requests that wait at a gateway, and for the operator's pins."""

import asyncio
import logging
from collections.abc import Sequence
from weakref import WeakValueDictionary

from adapters.decaying_sums import DecayingSums
from adapters.fair_threads import TooManyPending
from adapters.manifest import AdapterError
from adapters.tiers.adapter_reader import HostAdapter
from adapters.tiers.host_cache import HostCache
from wire.digests import digest_name
from wire.prefetch import PIN_SECONDS

logger = logging.getLogger(__name__)

# Half-life of the bytes that were loaded for a tenant's hints, in seconds.
HALF_LIFE_S = 30.0
# Share of the host memory that a tenant's recent hints may fill. A hint may be for a request that never comes, so
# beyond this share a tenant's adapters are loaded for its requests only. The last adapter may exceed the share by less
# than its own size, which is known only once its files are read: from a bucket, that is most of the load.
TENANT_SHARE = 1 / 8
# Share of the host memory for pinned adapters.
PINNED_SHARE = 1 / 4


class Prefetching:
    """Hinted loads of one engine. Call it on the event loop."""

    def __init__(self, host_cache: HostCache) -> None:
        self._host_cache = host_cache
        self._limit = host_cache.stats().max_bytes * TENANT_SHARE
        self._loaded = DecayingSums(HALF_LIFE_S)
        # A lock of each tenant with hints in progress.
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def load(self, digest: str, tenant_id: str) -> bool:
        """Load the adapter, in the tenant's turn, and return whether it is in host memory.

        A failed load is not an error here: the request that needs the adapter gets the error.
        """
        if self._host_cache.get(digest) is not None:
            return True
        # The loads follow one another, so that the next hint finds the bytes of this one counted.
        async with self._turns.setdefault(tenant_id, asyncio.Lock()):
            if self._host_cache.get(digest) is not None:
                return True
            if self._loaded.of(tenant_id) >= self._limit:
                return False
            adapter = await _load(self._host_cache, digest, tenant_id)
            if adapter is None:
                return False
            self._loaded.add(tenant_id, adapter.num_bytes)
            return True


class PinnedAdapters:
    """Adapters that gateways pin in host memory for the operator, each until PIN_SECONDS after its last request."""

    def __init__(self, host_cache: HostCache) -> None:
        self._host_cache = host_cache
        self._room = host_cache.stats().max_bytes * PINNED_SHARE
        # Bytes and end (of the event loop's clock) of each pinned adapter.
        self._pinned: dict[str, tuple[int, float]] = {}
        # Sizes in bytes of the adapters that had no room.
        self._unfit: dict[str, int] = {}

    async def pin(self, digests: Sequence[str]) -> int:
        """Load the adapters, and protect those that have room from eviction. Return the number of protected ones."""
        # Gateways repeat the request: an adapter that had no room would be loaded, and evict others, each time.
        self._unfit = {digest: self._unfit[digest] for digest in digests if digest in self._unfit}
        kept = 0
        try:
            for digest in digests:
                if digest not in self._pinned and not self._has_room(self._unfit.get(digest, 0)):
                    continue
                adapter = self._host_cache.get(digest) or await _load(self._host_cache, digest, "")
                kept += adapter is not None and self._pin(adapter)
        finally:
            asyncio.get_running_loop().call_later(PIN_SECONDS + 1.0, self._unpin_old)
        return kept

    def _has_room(self, num_bytes: int) -> bool:
        return sum(size for size, _ in self._pinned.values()) + num_bytes <= self._room

    def _pin(self, adapter: HostAdapter) -> bool:
        if adapter.digest not in self._pinned:
            if not self._has_room(adapter.num_bytes):
                self._unfit[adapter.digest] = adapter.num_bytes
                return False
            self._host_cache.pin(adapter.digest)
        self._pinned[adapter.digest] = adapter.num_bytes, asyncio.get_running_loop().time() + PIN_SECONDS
        return True

    def _unpin_old(self) -> None:
        now = asyncio.get_running_loop().time()
        for digest in [digest for digest, (_, end) in self._pinned.items() if end <= now]:
            del self._pinned[digest]
            self._host_cache.unpin(digest)


async def _load(host_cache: HostCache, digest: str, tenant_id: str) -> HostAdapter | None:
    """Load an adapter in the tenant's turn. Return None if that fails or too many loads wait."""
    try:
        load = host_cache.fetch(digest, tenant_id)
    except TooManyPending:
        return None
    try:
        # Shielded, because requests may wait for the same load.
        return await asyncio.shield(asyncio.wrap_future(load))
    except (AdapterError, OSError) as error:
        logger.info("adapter %s not loaded ahead: %s", digest_name(digest), " ".join(str(error).split()))
        return None
    finally:
        host_cache.stop_waiting(digest, tenant_id, load)
