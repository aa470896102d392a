"""Expected demand of running requests for KV blocks, so that admission leaves blocks for it.

Without it, requests are admitted while blocks are free, grow together, and preempt each other: 40 requests of 200 + 800
tokens in 400 blocks computed twice the useful tokens. The expected peak is that of LightLLM's "Past-Future" scheduler
(Gong et al., ASPLOS 2025): requests end at different times, so fewer blocks are needed than the sum of their ends.
"""

from bisect import insort
from collections.abc import Sequence

from engine.scheduling.kv_cache import KVCache
from engine.scheduling.request import Request
from wire.bounded_dict import BoundedDict

# Expected output tokens before any request of the tenant has ended. An answer of unknown length that is admitted too
# early is computed again; one that is admitted too late only waits.
PRIOR = 1024
# Tenants whose average output is known, those with the most recent ends.
MAX_TENANTS = 4096
# Factor on the average output: most answers of a mixture are shorter.
MARGIN = 1.5
# A request beyond its expected length is expected to grow by this part of its output so far, and by at least a block.
BEYOND = 0.25
_MEMORY = 0.95  # weight of the past in the average output


class BlockDemand:
    """Expected demand for KV blocks. The output length is learnt from each tenant's ended requests: no tenant's short
    answers make the engine admit too many of another's long ones.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._means = BoundedDict[str, float](MAX_TENANTS)
        # Running requests of the present step, and their sizes, in order.
        self._known: list[Request] = []
        self._sizes: list[tuple[float, int]] = []

    def observe(self, request: Request) -> None:
        """Update the tenant's average output with a request that ended without an abort or error."""
        outputs = float(request.num_output_tokens)
        mean = self._means.get(request.tenant_id, outputs)
        self._means.put(request.tenant_id, _MEMORY * mean + (1 - _MEMORY) * outputs)

    def begin_step(self) -> None:
        """Drop the sizes of the running requests, because each step changes them."""
        self._known.clear()
        self._sizes.clear()

    def leaves_room(self, request: Request, prefix: Sequence[int], running: Sequence[Request], cache: KVCache) -> bool:
        """Return whether the blocks suffice for the expected demand of the running requests and of this one, whose
        cached blocks are `prefix`. With no running request they do.

        Within a step, the sizes of requests that ran at the last call are not computed again.
        """
        if not running:
            return True
        # The expected peak is at most the sum of all requests' ends, each with a block of its own.
        most = sum([r.max_num_tokens for r in running]) + request.max_num_tokens
        if most // self._block_size + len(running) + 1 <= cache.num_blocks:
            return True
        if self._known != running[: len(self._known)]:  # a request was preempted
            self.begin_step()
        for other in running[len(self._known) :]:
            insort(self._sizes, self._size(other))
            self._known.append(other)
        sizes = self._sizes.copy()
        insort(sizes, self._size(request))
        shared = sum([len(r.blocks) for r in running]) + len(prefix) - (cache.num_blocks - cache.num_free)
        return self.peak(sizes) - max(0, shared) <= cache.num_blocks

    def _size(self, request: Request) -> tuple[float, int]:
        """Return (minus the expected number of further tokens, number of tokens so far)."""
        mean = self._means.get(request.tenant_id)
        expected = PRIOR if mean is None else MARGIN * mean
        outputs = request.num_output_tokens
        final = expected if outputs < expected else outputs * (1 + BEYOND) + self._block_size
        return outputs - min(final, request.params.max_tokens), request.num_tokens

    def peak(self, sizes: Sequence[tuple[float, int]]) -> int:
        """Return the expected maximum number of blocks that requests hold together, if they share none.

        It includes one more block for each request, because its last block may hold a single token. sizes: see `_size`,
        in order.
        """
        # Once the request with the n-th most tokens left ends, the n - 1 before it still run and have grown as much.
        held, peak = 0, 0.0
        for n, (left, tokens) in enumerate(sizes, 1):
            held += tokens
            if left < 0.0:
                if held - n * left > peak:
                    peak = held - n * left
            elif held > peak:
                peak = held
        return int(peak / self._block_size) + len(sizes)
