"""Drafts by a smaller model of the same vocabulary, with a KV cache of its own and without adapters.

Each request that drafts has a twin in the draft model: a request with the same tokens, followed by the drafts. The twin
samples with the request's parameters, seed and positions, so that similar models draw the same tokens. `propose` first
computes the tokens that the draft model has not seen yet, of all requests in one batch. Each further pass computes one
draft for each request.

A new prompt, or a request that had no drafts for a while, is far behind: it gets no drafts until its twin has caught
up, which takes several steps. Other requests draft in these steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.execution.runner import StepRunner, tokens_by_request
from engine.scheduling.draft_acceptance import ADAPTER_WEIGHT, DraftAcceptance
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.plan import Plan
from engine.scheduling.proposer import Proposal, Reason, SharedRates
from engine.scheduling.request import NOT_FINITE, NewRequest, Request, Status

# Work that a step may spend on requests that are far behind, in tokens of the base model.
CATCH_UP = 32
# Tokens that a request may be behind beyond its drafts: a step without drafts now and then measures the plain time.
USUAL_GAP = 2
# Share by which the rates of a request without drafts move towards those of a first request.
RECOVERY = 0.01


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes of a draft model's work. context: maximum tokens of a sequence. most_tokens: maximum tokens of a pass.
    most_drafts: maximum drafts of a request in a step. token_cost: work of a token relative to the base model's.
    """

    context: int
    most_tokens: int
    most_drafts: int
    token_cost: float


@dataclass(slots=True)
class _Follower:
    """A request's state in the draft model. drafts: the last proposal, after the first `start` tokens."""

    twin: Request
    rates: DraftAcceptance
    start: int = 0
    drafts: list[int] = field(default_factory=list)


class DraftModel:
    """Proposer that runs a draft model. It waits for the device in each pass."""

    def __init__(self, runner: StepRunner, cache: KVCache, sizes: DraftSizes) -> None:
        """cache: the blocks of the runner's KV cache, which only this object uses."""
        self.cache, self._runner, self._sizes = cache, runner, sizes
        self._followers: dict[Request, _Follower] = {}
        self._rates = SharedRates()
        self.is_catching_up = False

    def chances(self, request: Request, most: int, *, may_catch_up: bool) -> list[float]:
        """Return the chances of drafts; none for a request far behind that may not catch up, or that would need more
        work for it than for the answer's remaining tokens.
        """
        shared, follower = self._rates.of(request), self._followers.get(request)
        rates, num_behind = shared if follower is None else follower.rates, len(request.token_ids)
        if follower is None or not follower.drafts:
            rates.recover(RECOVERY)
        if follower is not None:
            self._follow(request, follower, shared)
            num_behind = follower.twin.num_to_compute
        num_left = request.params.max_tokens - request.num_output_tokens
        is_too_dear = not may_catch_up or num_behind * self._sizes.token_cost > num_left
        if is_too_dear and self._is_behind(num_behind):
            return []
        return rates.chances(min(most, self._sizes.context - len(request.token_ids)), is_first=True)

    def foresee(self, request: Request, *, may_catch_up: bool) -> float:
        """Return the chance of the next draft, which does not depend on the token in flight."""
        return max(self.chances(request, 1, may_catch_up=may_catch_up), default=0.0)

    def reason(self, request: Request) -> Reason:
        """Return whether a request without chances is too long for the draft model, or too far ahead of it."""
        return "catching_up" if len(request.token_ids) < self._sizes.context else "no_proposal"

    def propose(self, numbers: Mapping[Request, int]) -> dict[Request, Proposal]:
        self._drop_ended()
        drafting, spent = self._begin(numbers), dict.fromkeys(numbers, 0)
        self.is_catching_up = any(self._is_behind(self._followers[request].twin.num_to_compute) for request in drafting)
        while drafting:
            sampled = self._run(drafting)
            for request, num_tokens in drafting.items():
                spent[request] += num_tokens
            going_on = [r for r in drafting if self._take(self._followers[r], sampled, numbers[r])]
            drafting = dict.fromkeys(going_on, 1)
        return {
            request: Proposal(list(self._followers[request].drafts), num_tokens * self._sizes.token_cost)
            for request, num_tokens in spent.items()
        }

    def _is_behind(self, num_missing: int) -> bool:
        return num_missing > self._sizes.most_drafts + USUAL_GAP

    def _follow(self, request: Request, follower: _Follower, shared: DraftAcceptance) -> None:
        """Compare the last drafts with the request's tokens, and replace the twin's tokens by these."""
        twin, num_equal = follower.twin, follower.start
        for draft, token in zip(follower.drafts, request.token_ids[follower.start :], strict=False):
            is_first = num_equal == follower.start
            follower.rates.observe(draft == token, is_first=is_first)
            shared.observe(draft == token, is_first=is_first, weight=ADAPTER_WEIGHT)
            if draft != token:
                break
            num_equal += 1
        del twin.token_ids[num_equal:]
        twin.token_ids += request.token_ids[num_equal:]
        twin.num_computed = min(twin.num_computed, num_equal, len(twin.token_ids) - 1)
        follower.start, follower.drafts = len(twin.token_ids), []

    def _begin(self, numbers: Mapping[Request, int]) -> dict[Request, int]:
        """Return the tokens that each request's first pass computes. Those that lack least come first."""
        left, left_behind = self._sizes.most_tokens, int(CATCH_UP / self._sizes.token_cost)
        begun: dict[Request, int] = {}
        for request in numbers:
            if request not in self._followers:
                self._followers[request] = self._start(request)
            self._followers[request].twin.seat = request.seat
        for request in sorted(numbers, key=lambda r: self._followers[r].twin.num_to_compute):
            twin = self._followers[request].twin
            num_tokens = min(twin.num_to_compute, left)
            if self._is_behind(twin.num_to_compute):
                num_tokens = min(num_tokens, left_behind)
                left_behind -= num_tokens
            if num_tokens > 0 and self.cache.grow(twin, len(twin.token_ids) + numbers[request] - 1):
                begun[request] = num_tokens
                left -= num_tokens
                if request.matcher is not None:
                    twin.matcher = twin.mask = request.matcher.copy()
        return begun

    def _start(self, request: Request) -> _Follower:
        """Return the state of a request that the draft model has not seen, with the cached blocks of its beginning."""
        new = NewRequest(
            request.request_id,
            request.token_ids[: request.num_prompt_tokens],
            replace(request.params, logprobs=None, prompt_logprobs=None),
            tenant_id=request.tenant_id,
            cache_salt=request.cache_salt,
            prefix_keys=() if request.adapter_digest is not None else request.block_hashes,
        )
        twin = Request(new, seed=request.seed, stop_ids=request.stop_ids)
        twin.token_ids += request.token_ids[request.num_prompt_tokens :]
        self.cache.start(twin, self.cache.find_prefix(twin))
        shared = self._rates.of(request)
        return _Follower(twin, DraftAcceptance(shared.first, shared.after_success), len(twin.token_ids))

    def _run(self, plan: Mapping[Request, int]) -> Mapping[Request, list[int]]:
        """Run a pass. Return the twins' next tokens, of those whose tokens are all computed."""
        twins = Plan({self._followers[request].twin: num_tokens for request, num_tokens in plan.items()})
        sampled = tokens_by_request(self._runner.sample(self._runner.forward(twins)))
        for request, num_tokens in plan.items():
            follower = self._followers[request]
            computed = follower.twin.num_computed + num_tokens
            if computed <= follower.start:  # tokens of the request itself, whose blocks keep their content
                self.cache.advance(follower.twin, computed)
            else:
                follower.twin.num_computed = computed
        return sampled

    def _take(self, follower: _Follower, sampled: Mapping[Request, list[int]], most: int) -> bool:
        """Append a draft, if the pass has given one. Return whether another one may follow it."""
        twin, drafts = follower.twin, follower.drafts
        [token] = sampled.get(twin, [NOT_FINITE])
        if token == NOT_FINITE or twin.error is not None:
            return False
        twin.token_ids.append(token)
        drafts.append(token)
        if token in twin.stop_ids or len(drafts) >= most:
            return False
        return twin.matcher is None or (twin.matcher.advance(token) and not twin.matcher.ended)

    def _drop_ended(self) -> None:
        """Free the blocks of requests that no longer run. Those of a preempted one keep their content."""
        for request in [request for request in self._followers if request.status is not Status.RUNNING]:
            self.cache.free(self._followers.pop(request).twin)
