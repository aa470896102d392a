"""Planner of the next step: decodes first, then prompt chunks, in progress or new, in the policy's order.

Knows seats, blocks and adapter slots; knows no tensors and no text. A step computes at most `max_num_batched_tokens`
tokens. With chunked prefill, longer prompts are cut into chunks; without it, such a prompt is the only one of its step.

The next step may be planned during an in-flight step: its tokens count before they are known (`Request.num_pending`).
If a request turns out to have ended, its results of the planned step are dropped.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from adapters.tiers.device_pool import AdapterPool, Residency
from engine.errors import Fault
from engine.scheduling.block_demand import BlockDemand
from engine.scheduling.cost import load_cost, step_cost
from engine.scheduling.drafter import Drafter, is_doubtful
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.locality import DeviceLocality
from engine.scheduling.pacing import Pacer, PromptBudget, filling_rows, prompt_pressure
from engine.scheduling.plan import Plan, StepLimits
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.policy import Policy
from engine.scheduling.policies.tenants import FairShareSnapshot
from engine.scheduling.preemption_counts import PreemptionCounts
from engine.scheduling.reclaim import find_page_victims, find_victims, may_overcommit
from engine.scheduling.request import FinishReason, Request, Status
from engine.scheduling.seats import Seats
from engine.scheduling.streams import Streams
from engine.scheduling.targets import TargetCounts

# Share of max_num_batched_tokens at which a step takes no further prompt. More prompt tokens would cost the same in the
# next step, and here they would delay the first tokens of the prompts that end in this step.
FULL = 1 / 3
# Maximum blocks of the prompts that start in one step: finding and taking a block costs a microsecond, cached or new.
STARTED_BLOCKS = 8192
# Maximum number of waiting requests without a ready adapter that a step passes over: a few ms of look-ups. Fair share
# stops at a quarter of it.
PASSED_OVER = 256
# Maximum number of tenants that a step passes over because their prompts have no room in it.
WITHOUT_ROOM = 16
# Minimum time that leaving streams out of a step must save. On a GPU all rows together take less, so none are left out.
SAVED_S = 0.02
# Maximum number of requests that one step admits by preempting streams of tenants that are ahead.
RECLAIMED = 4


class Scheduler:
    """All requests of an engine, waiting and running. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        cache: KVCache,
        adapters: AdapterPool,
        limits: StepLimits,
        *,
        policy: Policy | None = None,
        pacer: Pacer | None = None,
        block_demand: BlockDemand | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """policy: fair share by default. `drafter` is set by the engine."""
        self.cache = cache
        self.adapters = adapters
        self.policy: Policy = FairShare() if policy is None else policy
        self._seats = Seats(limits.max_num_seqs, cache, adapters)
        self.running = self._seats.running
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.preempted = PreemptionCounts()
        self.drafter: Drafter | None = None
        self.targets = TargetCounts(self.policy, clock)
        self.num_decodes = 0  # streams in the last plan
        self.is_short = False  # whether the last plan left streams out; the pacer must not observe such a step
        self._streams = Streams(limits.max_num_seqs, self._seats, cache, self.policy)
        self._limits = limits
        self._chunked = limits.enable_chunked_prefill
        self._pacer = pacer if self._chunked else None
        self._block_demand = block_demand or BlockDemand(cache.block_size)
        self._clock = clock
        self._failed: list[Request] = []
        self._by_adapter: dict[str, dict[str, dict[str, Request]]] = {}  # by digest, tenant and request id
        # The requests that this step preempted, and the number of requests that it admitted by preemption.
        self._gave_way: set[Request] = set()
        self._num_reclaimed = 0

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    def tenants(self, limit: int) -> tuple[FairShareSnapshot, ...]:
        """Return snapshots of the accounts of the tenants with most waiting requests and service."""
        return tuple(self.policy.tenants(self.running, self._clock(), limit))

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        if request.adapter_digest is not None:
            tenants = self._by_adapter.setdefault(request.adapter_digest, {})
            tenants.setdefault(request.tenant_id, {})[request.request_id] = request
        now = self._clock()
        request.arrived_at = min(request.arrived_at, now)
        self.policy.enter(request, now, DeviceLocality(self.adapters, self.cache).on_device_among)

    def schedule(self, *, may_draft: bool = True) -> Plan:
        """Return the next step's plan, with its blocks and adapter slots reserved. The plan is empty if nothing can run
        now. may_draft: whether no step is in flight, so that drafts may follow the newest tokens.
        """
        plan = Plan()
        self._gave_way, self._num_reclaimed = set(), 0
        self._block_demand.begin_step()
        self.adapters.poll()
        # The tenant that caused a load pays for it, even if its request left before the load ended.
        for tenant_id, num_bytes in self.adapters.take_loaded_bytes().items():
            self.policy.add_tenant_service(tenant_id, load_cost(num_bytes / self.adapters.page_bytes))
        for request, claimant in find_page_victims(self.running, self.adapters, self.policy):
            self._preempt(request, plan, claimant)
        num_preemptions = self.num_preemptions
        planned = self._streams.plan(self._limits.max_num_batched_tokens)
        rows, prompts = (None, self._decode(plan)) if planned is None else planned
        if rows is not None:
            plan.update(dict.fromkeys(rows.requests, 1))
        if prompts or self.num_waiting:
            most = self._limits.max_num_batched_tokens - len(plan)
            self._shorten(plan, self._prefill(plan, self._budget_prompts(plan, most, prompts), prompts))
        else:
            self.is_short = False
        if rows is not None and (self.is_short or self.num_preemptions != num_preemptions):
            rows = None
        num_streams = 0 if rows is None else len(rows.requests)
        self.num_decodes = num_streams + sum(r.is_decoding for r in islice(plan, num_streams, None))
        may_draft = may_draft and not self.is_short
        has_drafts = self.drafter is not None and self.drafter.extend(plan, self.num_decodes, may_draft=may_draft)
        plan.streams = None if has_drafts else rows
        self._streams.keep(plan.streams)
        return plan

    def advance(self, plan: Plan) -> None:
        """Record a launched step. The step before it must be committed."""
        plan.advance(self.cache)
        self._streams.record_launch(plan.streams)

    def commit(self, sampled: Mapping[Request, int]) -> list[Request]:
        """Append a step's tokens to its requests, one to each. Return the requests that received one: those that had
        not ended before, and whose token does not depend on a draft.
        """
        moved = [r for r in sampled if r.status is not Status.FINISHED and not is_doubtful(r, sampled[r])]
        for request in moved:
            self._append(request, sampled[request])
        return moved

    def _append(self, request: Request, token_id: int) -> None:
        before = request.status  # waiting if it was preempted while its token was in flight
        num_tokens = len(request.token_ids)
        request.append(token_id)
        if request.num_drafted:
            self.cache.advance(request, len(request.token_ids) - 1)
        if request.ttft_target is not None:
            self.targets.count_token(request, num_tokens)
        if request.status is Status.FINISHED:
            if before is Status.WAITING:
                self.policy.remove(request)
            if request.error is None:
                self._block_demand.observe(request)
            self._release(request)

    def abort(self, request_id: str, *, is_complete: bool = False) -> Request | None:
        """End a request in any state. Return None if it is unknown or has ended. is_complete: see `Engine.abort`."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, "stop" if is_complete else "abort")
        return request

    def fail(self, request: Request, error: str) -> None:
        self._finish(request, "error", error)

    def take_failed(self) -> list[Request]:
        """Return the requests that ended without running because their adapter could not be loaded. Each is returned
        once.
        """
        failed, self._failed = self._failed, []
        return failed

    def _decode(self, plan: Plan) -> list[Request]:
        """Plan the next token of every running decode. Return the running requests whose prompts are in progress.

        The loop runs for every stream in every step, so it reads a request's counts once and calls only what it must.
        """
        budget, block_size, prompts = self._limits.max_num_batched_tokens, self.cache.block_size, list[Request]()
        for request in self.running.copy():
            num_tokens = len(request.token_ids) + request.num_pending
            num_outputs = num_tokens - request.num_prompt_tokens
            if num_outputs <= 0 or num_tokens - request.num_computed != 1:
                prompts.append(request)
                continue
            if len(plan) >= budget or num_outputs >= request.params.max_tokens:
                continue  # no room, or its last token is in flight
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier request of this loop
            if num_tokens > len(request.blocks) * block_size and not self._grow_or_preempt(request, num_tokens, plan):
                continue
            self._plan(plan, request, 1)
        return [request for request in prompts if request.status is Status.RUNNING] if prompts else prompts

    def _plan(self, plan: Plan, request: Request, num_tokens: int) -> None:
        """Plan a request's next tokens and count their service at once, so that the next choice already counts them."""
        plan[request] = num_tokens
        request.planned_cost = cost = step_cost(request, num_tokens)
        self.policy.add_service(request, cost)

    def _budget_prompts(self, plan: Plan, most: int, prompts: Sequence[Request]) -> PromptBudget:
        if self._pacer is None:
            return PromptBudget(most, most, most)
        target = self.policy.step_target(self._clock())
        rows = filling_rows(len(self.running), min(self.num_waiting, self._seats.num_free))
        return self._pacer.budget(len(plan), most, self._prompt_pressure(plan, prompts), target, rows)

    def _prefill(self, plan: Plan, budget: PromptBudget, prompts: list[Request]) -> set[str]:
        """Plan prompt chunks. Prompts in progress and new ones alike go to the least served tenants first, so that a
        tenant's long prompt delays another tenant's short one by a step, not by its own length. Prompts end one after
        the other, not all at once: the work is the same, but each has its first token as soon as possible.

        prompts: those in progress. Return the tenants that give way to the planned prompts.
        """
        admits, started_blocks, passed_over, without_room = True, 0, 0, 0
        giving_way: set[str] = set()
        # Each row of logits is as wide as the vocabulary, so memory bounds a step's rows. Without chunked prefill a
        # prompt cannot be cut.
        logits_left = (self._chunked and self._limits.max_prompt_logits) or sys.maxsize
        locality, has_seat = DeviceLocality(self.adapters, self.cache), self._seats.num_free > 0
        turns = self.policy.turns(prompts, locality, has_seat=has_seat)
        while not budget.is_spent and (request := turns.next(admits=admits)) is not None:
            if request.status is Status.FINISHED or request in plan:
                continue
            if request in self._gave_way:
                admits = False  # requests behind it have no better claim to its seat
                continue
            is_waiting = request.status is Status.WAITING
            if (is_waiting and request.num_pending) or (request.wants_prompt_logprobs and not logits_left):
                continue
            if is_waiting and not self._adapter_ready(request):
                passed_over += 1
                admits = passed_over < PASSED_OVER
                continue
            heavier = set() if request.num_output_tokens else self.policy.heavier(request, self.running)
            # A prompt of a tenant that gives way would delay the light tenant's first token.
            room = 0 if request.tenant_id in giving_way else budget.room(is_light=bool(heavier), joins=is_waiting)
            if room <= 0:
                if is_waiting:
                    turns.pass_over()  # the next tenant may be a light one, whose prompts have more room
                    without_room += 1
                    admits = without_room < WITHOUT_ROOM
                continue
            if is_waiting:
                admits = self._admit(request, plan, room, is_first=not budget.num_planned)
                if not admits:
                    continue
                started_blocks += len(request.blocks)
            num_tokens = request.num_to_compute
            if self._chunked and num_tokens > room:
                # Cut into even chunks: a short remainder would cost a step of its own.
                num_tokens = -(-num_tokens // -(-num_tokens // room))
            if request.wants_prompt_logprobs:
                num_tokens = min(num_tokens, logits_left)
                logits_left -= num_tokens
            self._plan(plan, request, num_tokens)
            budget.num_planned += num_tokens
            giving_way |= heavier
            if budget.num_planned >= FULL * self._limits.max_num_batched_tokens or started_blocks >= STARTED_BLOCKS:
                break
        return giving_way

    def _shorten(self, plan: Plan, giving_way: set[str]) -> None:
        """Move the decodes of tenants that give way to the next step, if that saves `SAVED_S`; never twice in a row."""
        rows = [r for r in plan if r.is_decoding and r.tenant_id in giving_way] if giving_way else []
        is_worth_it = self._pacer is not None and self._pacer.seconds_of(len(rows)) >= SAVED_S
        self.is_short = is_worth_it and not self.is_short
        for request in rows if self.is_short else ():
            del plan[request]
            self._return_service(request)

    def _admit(self, request: Request, plan: Plan, room: int, *, is_first: bool) -> bool:
        """Start a waiting request if a seat and blocks for its whole prompt are free, or if streams of tenants that are
        ahead give way. Two prompts with half of their blocks would only preempt each other.

        room: prompt tokens that the step has left for it. is_first: the step has no other prompt.
        """
        prefix = self.cache.find_prefix(request)
        to_compute = request.num_tokens - len(prefix) * self.cache.block_size
        if to_compute > room and not self._chunked and not is_first:
            return False
        missing_blocks = max(0, self.cache.num_missing_blocks(request, request.num_tokens, prefix))
        lacking = (0 if self._seats.num_free else 1, missing_blocks)
        if (
            lacking != (0, 0) or not self._block_demand.leaves_room(request, prefix, self.running, self.cache)
        ) and not self._reclaim(request, plan, lacking):
            return False
        self.policy.remove(request)
        self._seats.take(request, prefix)
        return True

    def _reclaim(self, request: Request, plan: Plan, lacking: tuple[int, int]) -> bool:
        """Preempt streams of tenants that are ahead until the request fits. Return False, without effect, if the policy
        does not allow that yet or if it would not suffice.
        """
        if self._num_reclaimed >= RECLAIMED:
            return False
        running, cache, (seats, blocks) = self.running, self.cache, lacking
        preemptible = self.policy.preemptible(request, running, self._clock(), keeps_blocks=seats > 0 and not blocks)
        victims: list[Request] | None = None
        if seats or blocks:
            victims = find_victims(request, preemptible, running, cache, lacking)
        elif may_overcommit(request, preemptible, running, cache, self._block_demand, self.policy):
            victims = []
        if victims is None:
            return False
        self._num_reclaimed += 1
        for victim in victims:
            self._preempt(victim, plan, request.tenant_id)
        return True

    def _adapter_ready(self, request: Request) -> bool:
        if request.adapter_digest is None:
            return True
        residency = self.adapters.ensure(request.adapter_digest, request.tenant_id, request.weight)
        if residency is Residency.READY:
            return True
        if residency is Residency.FAILED:
            self._fail_waiting(request.adapter_digest, Fault.of(self.adapters.error(request.adapter_digest)))
        return False

    def _fail_waiting(self, adapter: str, fault: Fault) -> None:
        """End all requests that wait for an adapter; otherwise each of them would request the same load again."""
        for request in [each for own in self._by_adapter[adapter].values() for each in own.values()]:
            if request.status is Status.WAITING:
                self.fail(request, str(fault.error()))
                request.fault = fault
                self._failed.append(request)

    def _prompt_pressure(self, plan: Plan, in_progress: Sequence[Request]) -> float:
        """Return the pressure of the prompts in progress and of those waiting prompts for which a seat is free."""
        prompts = Counter(r.tenant_id for r in in_progress)
        streams = Counter([r.tenant_id for r in plan])
        for tenant_id in streams:
            prompts[tenant_id] += min(self.policy.num_waiting(tenant_id), self._seats.num_free)
        return prompt_pressure(prompts, streams)

    def _grow_or_preempt(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        while not self.cache.grow(request, num_tokens):
            victim = self.policy.victim(self.running)
            self._preempt(victim, plan, request.tenant_id)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, plan: Plan, claimant: str) -> None:
        """Put a request back into the queue. claimant: the tenant that it is preempted for."""
        plan.pop(request, None)
        self._return_service(request)
        self._gave_way.add(request)
        self.num_preemptions += 1
        self.preempted.count(request.tenant_id, claimant)
        self.cache.keep(request)
        self._seats.release(request)
        request.preempt()
        self.policy.put_back(request, self._clock())

    def _return_service(self, request: Request) -> None:
        """Return the cost of planned work that will not be executed, or whose result will be dropped."""
        if cost := request.planned_cost + self._streams.take_cost(request):
            self.policy.add_service(request, -cost)
            request.planned_cost = 0.0

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.status is Status.WAITING:
            self.policy.remove(request)
        self.targets.count_end(request, reason)
        request.finish(reason, error)
        self._block_demand.observe(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        if request in self.running:
            self._seats.release(request)
        self.cache.forget(request)
        del self.requests[request.request_id]
        self._return_service(request)
        self.policy.leave(request)
        if request.adapter_digest is not None:
            digest, tenant_id = request.adapter_digest, request.tenant_id
            tenants = self._by_adapter[digest]
            del tenants[tenant_id][request.request_id]
            if not tenants[tenant_id]:
                del tenants[tenant_id]
                self.adapters.leave(digest, tenant_id)
            if not tenants:
                del self._by_adapter[digest]
                self.adapters.no_longer_wanted(digest)
