"""A step's plan and its limits, and streams: requests whose next plan is the last one moved on by a token.

The scheduler's loop over the running requests is the twin of `Streams`: both plan the same tokens and blocks. Their
charges to a tenant are equal up to rounding, because `Streams` adds the costs of its requests before it divides by the
weight. Where the weights are powers of two, the charges are exactly equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from engine.scheduling.cost import CONTEXT_TOKENS, step_cost
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.policies.policy import Policy
from engine.scheduling.request import NOT_FINITE, Request, Status
from engine.scheduling.seats import Seats


class Streams:
    """All running requests of an engine, each of which decodes one token a step.

    While they keep their seats, their counts are arrays that grow by one with each step, so that a step costs little
    for each of them. `Request` has the same counts.

    requests: in the plan's order. seats: their seats, int64 `[n]`. is_plain, is_greedy: whether all requests are plain,
    and have temperature 0. step: number of their plans before the present one. grown: those that have a new
    block in the present plan.
    """

    __slots__ = (
        "_accounts", "_costs", "_ends", "_is_launched", "_moves", "_num_left", "_owner", "_payers", "_room",
        "_stop_ids", "_with_news", "grown", "is_greedy", "is_plain", "requests", "seats", "step",
    )  # fmt: skip

    def __init__(self, requests: list[Request], owner: Seats) -> None:
        self.requests = requests
        self.seats = np.array([request.seat for request in requests], np.int64)
        self.is_plain = all(request.is_plain for request in requests)
        self.is_greedy = all(request.params.temperature == 0 for request in requests)
        self.step = 0
        self.grown: list[Request] = []
        self._owner, self._moves = owner, owner.num_moves
        self._is_launched = False
        self._num_left = 0

    @classmethod
    def of(cls, plan: Mapping[Request, int], owner: Seats, moved: "Streams | None") -> "Streams":
        """Return the requests of a plan as streams: all running ones, one token of each.

        moved: the streams whose `move_on` made this plan, None if the loop made it.
        """
        return moved if moved is not None and moved.are_seated else cls(list(plan), owner)

    @property
    def are_seated(self) -> bool:
        """Return whether no request of the engine has taken or left a seat since, so that these run and no others."""
        return self._owner.num_moves == self._moves

    @property
    def none_ends_by_length(self) -> bool:
        """Return whether all requests have their seats and none reaches its `max_tokens` with the tokens planned so
        far, those of the present plan included. False before the first `move_on`.
        """
        return self.are_seated and self._num_left > 0

    @property
    def was_moved_on(self) -> bool:
        """Return whether `move_on` made the present plan, rather than the scheduler's loop."""
        return self.step > 0

    def record_launch(self, *, are_all_sampled: bool) -> None:
        """Record that the plan's step was launched. `move_on` plans nothing after a step that was not, or that does
        not sample a token for every request.
        """
        self._is_launched = are_all_sampled

    def _read(self, block_size: int) -> None:
        """Read the counts of the requests at their first plan, all of whose tokens have been launched."""
        requests = self.requests
        # Tokens whose keys and values are computed at the end of the plan.
        self._ends = np.array([request.num_computed for request in requests], np.int64)
        self._room = np.array([len(request.blocks) for request in requests], np.int64) * block_size
        self._costs = np.array([step_cost(request, 1) for request in requests]) - 1 / CONTEXT_TOKENS
        self._num_left = min(request.params.max_tokens - request.num_output_tokens for request in requests)
        payers: dict[tuple[str, float], Request] = {}
        for request in requests:
            payers.setdefault((request.tenant_id, request.weight), request)
        self._payers = list(payers.values())
        index = {key: i for i, key in enumerate(payers)}
        self._accounts = np.array([index[request.tenant_id, request.weight] for request in requests])
        self._stop_ids = frozenset([NOT_FINITE]).union(*{request.stop_ids for request in requests})
        self._with_news = [i for i, request in enumerate(requests) if request.has_news]

    def move_on(self, cache: KVCache, policy: Policy) -> bool:
        """Plan the next token of each request: allocate the blocks and charge the tenants. Return False, without
        effect, if the last plan's step was not launched or did not sample every request, if a request of the engine
        has taken or left a seat, if a request reaches its `max_tokens` with a token that is already planned, or if
        too few blocks are free.
        """
        if not (self._is_launched and self.are_seated):
            return False
        if not self.step:
            self._read(cache.block_size)
        if not self._num_left:
            return False
        ends = self._ends + 1
        short = np.flatnonzero(ends > self._room)
        if len(short) > cache.num_free:
            return False
        self.grown = [self.requests[i] for i in short.tolist()]
        for request, end in zip(self.grown, ends[short].tolist(), strict=True):
            cache.grow(request, end)
        self._room[short] += cache.block_size
        self._costs += 1 / CONTEXT_TOKENS
        for request, cost in zip(self._payers, np.bincount(self._accounts, self._costs).tolist(), strict=True):
            policy.charge(request, cost)
        for request, cost in zip(self.requests, self._costs.tolist(), strict=True):
            request.charged = cost
        self._ends = ends
        self._num_left -= 1
        self.step += 1
        self._is_launched = False
        return True

    def advance(self, cache: KVCache) -> None:
        """See `Plan.advance`."""
        for request in self.requests:
            request.num_computed += 1
            request.charged = 0.0
        for i in np.flatnonzero(self._ends % cache.block_size == 0).tolist():
            cache.register(self.requests[i])

    def append(self, token_ids: Sequence[int]) -> list[int]:
        """Append a token to each request that goes on after it. Return the rows of the others, and of requests
        that have news: theirs are to be appended by `Request.append`. Needs `none_ends_by_length`.
        """
        rows = self._with_news
        if not self._stop_ids.isdisjoint(token_ids):
            rows = sorted({*rows, *(i for i, token in enumerate(token_ids) if token in self._stop_ids)})
        requests: Iterable[Request] = self.requests
        if rows:
            goes_on = np.ones(len(token_ids), np.bool_)
            goes_on[rows] = False
            requests, token_ids = compress(requests, goes_on), list(compress(token_ids, goes_on))
        for request, token in zip(requests, token_ids, strict=True):
            request.token_ids.append(token)
            request.num_pending = 0
        return rows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes of a step. max_prompt_logits: limit of its rows of logits for prompt_logprobs; None: no limit."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    max_prompt_logits: int | None = None


class Plan(dict[Request, int]):
    """Each scheduled request and how many of its tokens the step computes.

    streams: the plan's requests, if they are `Streams`; set when the plan is complete.
    """

    streams: Streams | None = None

    def advance(self, cache: KVCache) -> None:
        """Record the computed tokens and full blocks of a launched step. The tokens of requests with drafts are
        recorded when they are committed.
        """
        if self.streams is not None and self.streams.was_moved_on and self.streams.are_seated:
            self.streams.advance(cache)
            return
        for request, num_tokens in self.items():
            if request.status is Status.RUNNING:  # else it ended while this step was being launched
                request.charged = 0.0
                if not request.num_drafted:
                    cache.advance(request, request.num_computed + num_tokens)
