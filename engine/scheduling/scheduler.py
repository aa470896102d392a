"""Plan the next step: running streams first, then prompt work, in progress or new, by fair share.

Knows blocks, adapter slots and counters; knows no tensors and no text. A step spends at most `max_num_batched_tokens`
tokens, cutting prompts into chunks where that is enabled; else a prompt longer than that is a step's only one.

The next step may be planned while one is in flight: its tokens count before they are known (`Request.num_pending`). If
a request turns out to have ended, its results of the planned step are dropped.
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

# Of max_num_batched_tokens. Prompt tokens beyond it cost no less in this step than in the next, and would keep the
# prompts that end here from their first tokens until they are computed.
FULL = 1 / 3
# Blocks of the prompts that start in one step: to find and take one costs a microsecond, whether it is cached or new.
STARTED_BLOCKS = 8192


class Scheduler:
    """All requests of an engine, waiting and running. Not thread-safe: the engine thread owns it."""

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
        """max_prompt_logits: rows of logits that a step may compute for prompt_logprobs; None is unlimited."""
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
        if request.adapter is not None:
            self._by_adapter.setdefault(request.adapter, {})[request.request_id] = request
        self.fair_share.enter(request)

    def schedule(self) -> Plan:
        """The next step's plan, its blocks and adapter slots taken. Empty when nothing can run now."""
        plan: Plan = {}
        self.adapters.poll()
        budget = self._decode(plan, self._max_num_batched_tokens)
        if plan and self._pacer is not None:
            budget = self._pacer.prompt_budget(len(plan), budget, self._patience(plan))
        self._prefill(plan, budget)
        return plan

    def advance(self, plan: Plan) -> None:
        """Books a step that was launched: computed tokens, full blocks. The step before it must be committed."""
        for request, num_tokens in plan.items():
            if request.status is Status.RUNNING:  # else it ended while this step was on its way
                self.fair_share.charge(request, num_tokens)
                request.num_computed += num_tokens
                self.cache.register(request)

    def commit(self, sampled: dict[Request, int]) -> list[Request]:
        """Takes a step's tokens. Returns the requests that got one: those that had not been ended meanwhile."""
        moved = [request for request in sampled if request.status is not Status.FINISHED]
        for request in moved:
            is_waiting = request.status is Status.WAITING  # preempted while its token was on its way
            request.append(sampled[request])
            if request.status is Status.FINISHED:
                if is_waiting:
                    self.fair_share.remove(request)
                self._release(request)
        return moved

    def abort(self, request_id: str) -> Request | None:
        """Finishes a request wherever it is; None if it is not here any more."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._finish(request, "abort")
        return request

    def fail(self, request: Request, error: str) -> None:
        self._finish(request, "error", error)

    def take_failed(self) -> list[Request]:
        """Requests that ended without running: their adapter could not be loaded."""
        failed, self._failed = self._failed, []
        return failed

    def _decode(self, plan: Plan, budget: int) -> int:
        """Every running stream's next token; what is left of the budget."""
        for request in [r for r in self.running if r.is_decoding]:
            if budget <= 0:
                break
            if request.status is not Status.RUNNING:
                continue  # preempted for one before it
            if request.num_output_tokens >= request.params.max_tokens:
                continue  # its last token is in flight
            if self._grow_or_preempt(request, request.num_tokens, plan):
                plan[request] = 1
                budget -= 1
        return budget

    def _prefill(self, plan: Plan, budget: int) -> None:
        """Plan prompt chunks. Those in progress and new ones alike go to the tenants served least, so that a
        tenant's long prompt delays another's short one by a step, not by its own length. Prompts end one after the
        other, not all at once: the work is the same, but each has its first token as soon as possible.
        """
        may_drain, has_room, most, started_blocks = True, True, budget, 0
        # Each row is as wide as the vocabulary, so a step's rows are bounded by memory. Without chunks a prompt cannot
        # be cut.
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
                if not self._adapter_ready(request, may_drain=may_drain):
                    may_drain = may_drain and request.status is Status.FINISHED
                    continue
                has_room = self._admit(request, budget, is_first=budget == most)
                if not has_room:
                    continue
                started_blocks += len(request.blocks)
            num_tokens = request.num_to_compute
            if self._chunked and num_tokens > budget:
                # In even shares: a few tokens left over would cost their prompt a step more.
                num_tokens = -(-num_tokens // -(-num_tokens // budget))
            if request.wants_prompt_logprobs:
                num_tokens = min(num_tokens, logits_left)
                logits_left -= num_tokens
            plan[request] = num_tokens
            budget -= num_tokens
            if most - budget >= FULL * self._max_num_batched_tokens or started_blocks >= STARTED_BLOCKS:
                return

    def _admit(self, request: Request, budget: int, *, is_first: bool) -> bool:
        """Starts a waiting request if there is a seat and room for its whole prompt; half of one would only be
        preempted by another half. is_first: no other prompt is in the step."""
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
        if request.adapter is not None:
            request.adapter_slot = self.adapters.pin(request.adapter)
        request.seat = self._free_seats.pop()
        self.running.append(request)
        return True

    def _adapter_ready(self, request: Request, *, may_drain: bool) -> bool:
        if request.adapter is None:
            return True
        residency = self.adapters.ensure(request.adapter)
        if residency is Residency.READY:
            return True
        if residency is Residency.FAILED:
            self._fail_waiting(request.adapter, self.adapters.error(request.adapter))
        elif residency is Residency.NO_ROOM and may_drain:
            # The least served request that lacks room takes the pages of the tenants furthest ahead as they finish.
            ahead = sorted(
                (r for r in self.running if r.adapter), key=lambda r: self.fair_share.counter(r.tenant), reverse=True
            )
            self.adapters.drain_for(request.adapter, [r.adapter for r in ahead if r.adapter])
        return False

    def _fail_waiting(self, adapter: str, error: Exception) -> None:
        """End all requests that wait for an adapter; otherwise each of them would request the same load again."""
        for request in list(self._by_adapter[adapter].values()):
            if request.status is Status.WAITING:
                self.fail(request, str(error))
                request.error_param = "model" if isinstance(error, AdapterError) else None
                self._failed.append(request)

    def _patience(self, streams: Plan) -> float:
        """What the prompts that could be computed now weigh against these streams, of the tenant where it is least: a
        tenant's streams wait longer for its own prompts only. Prompts behind the first count twice: a stream that waits
        is still ahead of who reads it. One alone, however long, is no reason to let streams wait."""
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
        if request.adapter is not None:
            others = self._by_adapter[request.adapter]
            del others[request.request_id]
            if not others:
                del self._by_adapter[request.adapter]
                self.adapters.no_longer_wanted(request.adapter)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self._free_seats.append(request.seat)
        request.seat = -1
        self.cache.free(request)
        if request.adapter is not None:
            self.adapters.unpin(request.adapter)
            request.adapter_slot = -1
