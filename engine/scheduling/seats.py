"""Running requests and their resources: a seat, blocks and an adapter's pin, taken together and returned together.

Independent of their order: the scheduler and its policy decide who starts and who stops.
"""

from adapters.tiers.device_pool import AdapterPool
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.request import Request


class Seats:
    """Rows of a step. running: the requests that have one, in the order in which they started. num_moves: number of
    times that a request has taken or left a seat.
    """

    def __init__(self, number: int, cache: KVCache, adapters: AdapterPool) -> None:
        self.running: list[Request] = []
        self.num_moves = 0
        self._cache = cache
        self._adapters = adapters
        self._free = list(range(number - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, prefix: list[int]) -> None:
        """Start a request with blocks for all its tokens. Needs free blocks, a free seat and a ready adapter.

        prefix: the cached blocks of its beginning.
        """
        self._cache.start(request, prefix)
        self._cache.grow(request, request.num_tokens)
        if request.adapter_digest is not None:
            request.adapter_slot = self._adapters.pin(request.adapter_digest, request.tenant_id)
            request.num_adapter_pages = self._adapters.num_pages_of(request.adapter_digest)
        request.seat = self._free.pop()
        self.running.append(request)
        self.num_moves += 1

    def release(self, request: Request) -> None:
        """Return all resources of a running request."""
        self.running.remove(request)
        self.num_moves += 1
        self._free.append(request.seat)
        request.seat = -1
        self._cache.free(request)
        if request.adapter_digest is not None:
            self._adapters.unpin(request.adapter_digest)
            request.adapter_slot = -1
