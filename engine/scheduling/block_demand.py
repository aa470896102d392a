"""Expected demand of running requests for KV blocks, so that admission leaves blocks for it.

Without it, requests are admitted while blocks are free, grow together, and preempt each other: 40 requests of 200 + 800
tokens in 400 blocks computed twice the useful tokens. The expected peak is that of LightLLM's "Past-Future" scheduler
(Gong et al., ASPLOS 2025): requests end at different times, so fewer blocks are needed than the sum of their ends.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from engine.scheduling.kv_cache import KVCache
from engine.scheduling.request import Request

# Expected average output tokens of a tenant's answers before any has ended. An answer of unknown length that is
# admitted too early is computed again; one that is admitted too late only waits.
PRIOR = 700
# Tenants whose average output is known, those with the most recent ends.
MAX_TENANTS = 4096
# Weight of what is expected without a tenant's own answers, in such answers, before the first: a single one of them
# decides little. It shrinks to 0 as the tenant's answers become many.
PRIOR_ANSWERS = 4
# Factor on the average output: most answers of a mixture are shorter.
MARGIN = 1.5
# A request beyond its expected length is expected to grow by this part of its output so far, and by at least a block.
BEYOND = 0.25
_MEMORY = 0.95  # weight of the past in the average output


class _Answers(NamedTuple):
    """A tenant's ended answers: their number, of which older ones count less, and their average output tokens."""

    number: float = 0.0
    average: float = 0.0

    def add(self, outputs: int) -> "_Answers":
        number = _MEMORY * self.number + 1
        return _Answers(number, self.average + (outputs - self.average) / number)

    def expected(self, prior: float) -> float:
        """Return the expected output tokens of the next one. prior: their expected number without these answers."""
        weight = PRIOR_ANSWERS * (1 - (1 - _MEMORY) * self.number)  # `number` grows towards 1 / (1 - _MEMORY)
        return (self.number * self.average + weight * prior) / (self.number + weight)


class BlockDemand:
    """Expected demand for KV blocks, from the lengths of ended answers.

    A tenant's expected output is learnt from its own answers and, while these are few, from an average in which each
    tenant counts once: no tenant's answers make the engine admit too many requests of another.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._answers = OrderedDict[str, _Answers]()
        self._sum = 0.0  # over tenants, of what is expected without the average over tenants
        # Expected output tokens by tenant, of the present step.
        self._expected: dict[str, float] = {}
        # Running requests of the present step, and their sizes, in order.
        self._known: list[Request] = []
        self._sizes: list[tuple[float, int]] = []

    def observe(self, request: Request) -> None:
        """Learn from the length of an answer, if its model ended it, or if it is longer than expected: one that was cut
        at its limit could have been longer, and the next one's limit may be higher.
        """
        is_longer = MARGIN * request.num_output_tokens > self.expected_outputs(request.tenant_id)
        if request.finish_reason != "stop" and not (request.finish_reason == "length" and is_longer):
            return
        if request.tenant_id in self._answers:
            before = self._answers.pop(request.tenant_id)
            self._sum -= before.expected(PRIOR)
        else:
            before = _Answers()
            if len(self._answers) == MAX_TENANTS:
                self._sum -= self._answers.popitem(last=False)[1].expected(PRIOR)
        after = self._answers[request.tenant_id] = before.add(request.num_output_tokens)
        self._sum += after.expected(PRIOR)
        self._expected.clear()

    def expected_outputs(self, tenant_id: str) -> float:
        """Return the expected output tokens of a tenant's next answer, with a margin."""
        found = self._expected.get(tenant_id)
        if found is None:
            over_tenants = (PRIOR + self._sum) / (1 + len(self._answers))
            found = MARGIN * self._answers.get(tenant_id, _Answers()).expected(over_tenants)
            self._expected[tenant_id] = found
        return found

    def further_blocks(self, requests: Sequence[Request]) -> int:
        """Return the blocks that requests are expected to need beyond those that they hold."""
        further = 0
        for request in requests:
            minus_left, tokens = self._size(request)
            further += ceil((tokens - minus_left) / self._block_size) - len(request.blocks)
        return further

    def begin_step(self) -> None:
        """Drop the expectations and the sizes of the running requests, because each step changes them."""
        self._expected.clear()
        self._known.clear()
        self._sizes.clear()

    def leaves_room(self, request: Request, prefix: Sequence[int], running: Sequence[Request], cache: KVCache) -> bool:
        """Return whether the blocks suffice for a request and the running ones until the request's expected end. They
        do if none runs.

        prefix: its cached blocks. Demand after its end does not count: streams that fill the cache later leave room for
        short answers before. Within a step, the sizes of requests that ran at the last call are not computed again.
        """
        if not running:
            return True
        # The expected peak is at most the sum of all requests' ends, each with a block of its own.
        most = sum([r.max_num_tokens for r in running]) + request.max_num_tokens
        if most // self._block_size + len(running) + 1 <= cache.num_blocks:
            return True
        if self._known != running[: len(self._known)]:  # a request was preempted
            self.begin_step()
        new = running[len(self._known) :]
        self._sizes += map(self._size, new)
        self._sizes.sort()
        self._known += new
        own = self._size(request)
        # Others grow until its end, at the latest: in as many steps as it lacks tokens, if each computes one of them.
        end = own[0] - max(1, own[1] - len(prefix) * self._block_size)
        sizes = [(left if left > end else end, tokens) for left, tokens in self._sizes]
        insort(sizes, own)
        shared = sum([len(r.blocks) for r in running]) + len(prefix) - (cache.num_blocks - cache.num_free)
        return self.peak(sizes) - max(0, shared) <= cache.num_blocks

    def _size(self, request: Request) -> tuple[float, int]:
        """Return (minus the expected number of further tokens, number of tokens so far)."""
        num_tokens, expected = request.num_tokens, self.expected_outputs(request.tenant_id)
        outputs = num_tokens - request.num_prompt_tokens
        final = expected if outputs < expected else outputs * (1 + BEYOND) + self._block_size
        return outputs - min(final, request.params.max_tokens), num_tokens

    def peak(self, sizes: Sequence[tuple[float, int]]) -> int:
        """Return the expected maximum number of blocks that requests hold together, if they share none.

        It includes one more block for each request, because its last block may hold a single token. sizes: see `_size`,
        the most tokens left first.
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
