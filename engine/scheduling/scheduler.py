"""Planner of the next step: decodes first, then prompt chunks, in progress or new, by fair share.

Knows blocks, adapter slots and counters; knows no tensors and no text. A step computes at most `max_num_batched_tokens`
tokens. With chunked prefill, longer prompts are cut into chunks; without it, such a prompt is the only one of its step.

The next step may be planned during an in-flight step: its tokens count before they are known (`Request.num_pending`).
If a request turns out to have ended, its results of the planned step are dropped.
"""

import sys
from collections import Counter

from adapters.manifest import AdapterError
from adapters.tiers.device_pool import AdapterPool, Residency
from engine.scheduling.fair_share import FairShare
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.pacing import Pacer
from engine.scheduling.request import FinishReason, Request, Status

Plan = dict[Request, int]
"""Each scheduled request and how many of its tokens the step computes."""

# Share of max_num_batched_tokens at which a step takes no further prompt. More prompt tokens would cost the same in the
# next step, and here they would delay the first tokens of the prompts that end in this step.
FULL = 1 / 3
# Limit of blocks of the prompts that start in one step: finding and taking a block costs a microsecond, cached or new.
STARTED_BLOCKS = 8192


class Scheduler:
    """All requests of an engine, waiting and running. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        cache: KVCache,
        adapters: AdapterPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        pacer: Pacer | None = None,
        max_prompt_logits: int | None = None,
    ) -> None:
        """max_prompt_logits: limit of a step's rows of logits for prompt_logprobs; None: no limit."""
        self.cache = cache
        self.adapters = adapters
        self.fair_share = FairShare()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunked = enable_chunked_prefill
        self._pacer = pacer if enable_chunked_prefill else None
        self._max_prompt_logits = max_prompt_logits
        self._failed: list[Request] = []
        self._by_adapter: dict[str, dict[str, Request]] = {}
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_waiting(self) -> int:
        return len(self.fair_share)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        if request.adapter_digest is not None:
            self._by_adapter.setdefault(request.adapter_digest, {})[request.request_id] = request
        self.fair_share.enter(request)

    def schedule(self) -> Plan:
        """Return the next step's plan, with its blocks and adapter slots reserved. The plan is empty if nothing can run
        now.
        """
        plan: Plan = {}
        self.adapters.poll()
        self._free_reserved_pages()
        budget = self._decode(plan, self._max_num_batched_tokens)
        if plan and self._pacer is not None:
            budget = self._pacer.prompt_budget(len(plan), budget, self._patience(plan))
        self._prefill(plan, budget)
        return plan

    def advance(self, plan: Plan) -> None:
        """Record a launched step: computed tokens and full blocks. The step before it must be committed."""
        for request, num_tokens in plan.items():
            if request.status is Status.RUNNING:  # else it ended while this step was being launched
                self.fair_share.charge(request, num_tokens)
                request.num_computed += num_tokens
                self.cache.register(request)

    def commit(self, sampled: dict[Request, int]) -> list[Request]:
        """Append a step's tokens to its requests. Return the requests that received one: those that had not ended
        before.
        """
        moved = [request for request in sampled if request.status is not Status.FINISHED]
        for request in moved:
            is_waiting = request.status is Status.WAITING  # preempted while its token was in flight
            request.append(sampled[request])
            if request.status is Status.FINISHED:
                if is_waiting:
                    self.fair_share.remove(request)
                self._release(request)
        return moved

    def abort(self, request_id: str) -> Request | None:
        """End a request in any state. Return None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._finish(request, "abort")
        return request

    def fail(self, request: Request, error: str) -> None:
        self._finish(request, "error", error)

    def take_failed(self) -> list[Request]:
        """Return the requests that ended without running because their adapter could not be loaded. Each is returned
        once.
        """
        failed, self._failed = self._failed, []
        return failed

    def _decode(self, plan: Plan, budget: int) -> int:
        """Plan the next token of every running decode. Return the rest of the budget."""
        for request in [r for r in self.running if r.is_decoding]:
            if budget <= 0:
                break
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier request of this loop
            if request.num_output_tokens >= request.params.max_tokens:
                continue  # its last token is in flight
            if self._grow_or_preempt(request, request.num_tokens, plan):
                plan[request] = 1
                budget -= 1
        return budget

    def _prefill(self, plan: Plan, budget: int) -> None:
        """Plan prompt chunks. Prompts in progress and new ones alike go to the least served tenants first, so that a
        tenant's long prompt delays another tenant's short one by a step, not by its own length. Prompts end one after
        the other, not all at once: the work is the same, but each has its first token as soon as possible.
        """
        has_room, most, started_blocks = True, budget, 0
        # Each row of logits is as wide as the vocabulary, so memory bounds a step's rows. Without chunked prefill a
        # prompt cannot be cut.
        logits_left = self._max_prompt_logits if self._chunked and self._max_prompt_logits else sys.maxsize
        in_progress = [r for r in self.running if not r.is_decoding]
        for request in self.fair_share.least_served_first(in_progress):
            if budget <= 0:
                return
            if request.status is Status.FINISHED or (request.wants_prompt_logprobs and not logits_left):
                continue
            if request.status is Status.WAITING:
                if not has_room or request.num_pending:
                    continue
                if not self._adapter_ready(request):
                    continue
                has_room = self._admit(request, budget, is_first=budget == most)
                if not has_room:
                    continue
                started_blocks += len(request.blocks)
            num_tokens = request.num_to_compute
            if self._chunked and num_tokens > budget:
                # Cut into even chunks: a short remainder would cost a step of its own.
                num_tokens = -(-num_tokens // -(-num_tokens // budget))
            if request.wants_prompt_logprobs:
                num_tokens = min(num_tokens, logits_left)
                logits_left -= num_tokens
            plan[request] = num_tokens
            budget -= num_tokens
            if most - budget >= FULL * self._max_num_batched_tokens or started_blocks >= STARTED_BLOCKS:
                return

    def _admit(self, request: Request, budget: int, *, is_first: bool) -> bool:
        """Start a waiting request if a seat and blocks for its whole prompt are free. Two prompts with half of their
        blocks would only preempt each other.

        is_first: the step has no other prompt.
        """
        if len(self.running) >= self._max_num_seqs:
            return False
        prefix = self.cache.find_prefix(request)
        to_compute = request.num_tokens - len(prefix) * self.cache.block_size
        if to_compute > budget and not self._chunked and not is_first:
            return False
        if not self.cache.can_allocate(request, request.num_tokens, prefix):
            return False
        self.fair_share.remove(request)
        self.cache.start(request, prefix)
        self.cache.grow(request, request.num_tokens)
        if request.adapter_digest is not None:
            request.adapter_slot = self.adapters.pin(request.adapter_digest, request.tenant)
        request.seat = self._free_seats.pop()
        self.running.append(request)
        return True

    def _adapter_ready(self, request: Request) -> bool:
        if request.adapter_digest is None:
            return True
        residency = self.adapters.ensure(request.adapter_digest, request.tenant, request.weight)
        if residency is Residency.READY:
            return True
        if residency is Residency.FAILED:
            self._fail_waiting(request.adapter_digest, self.adapters.error(request.adapter_digest))
        return False

    def _fail_waiting(self, adapter: str, error: Exception) -> None:
        """End all requests that wait for an adapter; otherwise each of them would request the same load again."""
        for request in list(self._by_adapter[adapter].values()):
            if request.status is Status.WAITING:
                self.fail(request, str(error))
                request.error_param = "model" if isinstance(error, AdapterError) else None
                self._failed.append(request)

    def _patience(self, streams: Plan) -> float:
        """Return how strongly waiting prompts should slow down decoding: per tenant `(2 * prompts - 1) / streams`, the
        minimum over tenants with decoding streams. A tenant's decodes are slowed only for its own prompts.

        Prompts after the first count twice, because a delayed stream is usually still ahead of its reader. A single
        prompt, however long, gives at most 1, which does not slow decodes beyond `stretch`.
        """
        prompts = Counter(r.tenant for r in self.running if not r.is_decoding)
        for tenant in {r.tenant for r in streams}:
            prompts[tenant] += min(self.fair_share.num_waiting(tenant), len(self._free_seats))
        return min(
            (2 * prompts[tenant] - 1) / num_streams
            for tenant, num_streams in Counter(r.tenant for r in streams).items()
        )

    def _grow_or_preempt(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        while not self.cache.grow(request, num_tokens):
            victim = max(self.running, key=lambda r: (self.fair_share.counter(r.tenant), r.arrival))
            plan.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _free_reserved_pages(self) -> None:
        """Preempt the holders of pages that an adapter has waited for too long, of the tenants furthest ahead. A tenant
        that is itself furthest ahead waits for its own requests to end.
        """
        overdue = self.adapters.overdue
        if not overdue:
            return
        ahead = sorted(
            (r for r in self.running if r.adapter_digest),
            key=lambda r: (self.fair_share.counter(r.tenant), r.arrival),
            reverse=True,
        )
        if not ahead or all(reservation.tenant == ahead[0].tenant for reservation in overdue):
            return
        holders = set(self.adapters.holders_to_preempt(r.adapter_digest for r in ahead if r.adapter_digest))
        for request in [r for r in ahead if r.adapter_digest in holders]:
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._leave_running(request)
        request.preempt()
        self.fair_share.push(request, front=True)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.status is Status.WAITING:
            self.fair_share.remove(request)
        request.finish(reason, error)
        self._release(request)

    def _release(self, request: Request) -> None:
        if request in self.running:
            self._leave_running(request)
        del self.requests[request.request_id]
        self.fair_share.leave(request)
        if request.adapter_digest is not None:
            others = self._by_adapter[request.adapter_digest]
            del others[request.request_id]
            if not others:
                del self._by_adapter[request.adapter_digest]
                self.adapters.no_longer_wanted(request.adapter_digest)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self._free_seats.append(request.seat)
        request.seat = -1
        self.cache.free(request)
        if request.adapter_digest is not None:
            self.adapters.unpin(request.adapter_digest)
            request.adapter_slot = -1
