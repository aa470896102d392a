"""A step's plan and its limits."""

from dataclasses import dataclass
from itertools import islice

from engine.scheduling.kv_cache import KVCache
from engine.scheduling.request import Request, Status
from engine.scheduling.streams import StreamRows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes of a step. max_prompt_logits: limit of its rows of logits for prompt_logprobs; None: no limit."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    max_prompt_logits: int | None = None


class Plan(dict[Request, int]):
    """Each scheduled request and how many of its tokens the step computes.

    streams: the plan's first requests, if `Streams` planned them; set when the plan is complete.
    """

    streams: StreamRows | None = None

    def advance(self, cache: KVCache) -> None:
        """Record the computed tokens and full blocks of a launched step. The tokens of requests with drafts are
        recorded when they are committed.

        The loops run for every stream in every step, so they do what `KVCache.advance` does without a call.
        """
        block_size, running = cache.block_size, Status.RUNNING  # a member of an enumeration is slow to look up
        rows = self.streams
        if rows is not None:
            for request in rows.requests:
                if request.status is running:  # else it ended while this step was being launched
                    request.num_computed += 1
            for i in (rows.ends % block_size == 0).nonzero()[0].tolist():
                if rows.requests[i].status is running:
                    cache.register(rows.requests[i])
        num_streams = 0 if rows is None else len(rows.requests)
        for request, num_tokens in islice(self.items(), num_streams, None):
            if request.status is running:
                request.planned_cost = 0.0
                if not request.num_drafted:
                    request.num_computed += num_tokens
                    if request.num_computed >= (request.num_registered_blocks + 1) * block_size:
                        cache.register(request)
