"""Speculative decoding: drafts of the next tokens, which a step computes beside the newest token of a request.

A draft is accepted if it equals the token that the sampler draws at its place, after everything before it is committed:
grammar, penalties, seeds and stop tokens see the same state as without drafts, so no answer changes. Only steps without
prompts have drafts. Their number follows from measured times: a draft is planned if its probability of being accepted
is worth the time that it adds. Independent of tensors.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Literal, NamedTuple

from engine.scheduling.cost import DRAFT, step_cost
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.policies.policy import Policy
from engine.scheduling.proposer import Proposal, Proposer
from engine.scheduling.request import NOT_FINITE, Request, Status
from engine.scheduling.step_times import StepTimes

# Adapters with counts of their own; further ones share the counts of OTHERS.
COUNTED_ADAPTERS = 50
OTHERS = "others"
# Whether a step with decodes had drafts, or why it had none: it had prompts too; a draft cost more time than it was
# likely to save; the time without drafts was measured; rows of logits or blocks were lacking; or a proposer's `Reason`.
Outcome = Literal["drafted", "prompts", "cost", "measuring", "no_room", "catching_up", "no_proposal"]


class DraftCount(NamedTuple):
    """Drafts computed for an adapter's requests, and accepted ones. adapter: digest, "" for the base, or OTHERS."""

    adapter: str
    drafted: int
    accepted: int


class Drafter:
    """Plans and confirms an engine's drafts. Call its methods in this order: `extend` at the end of a plan, `confirm`
    after each commit, `end_step`, `observe`. `expects` is called before a plan while a step is in flight.
    """

    def __init__(self, proposer: Proposer, most_drafts: int, cache: KVCache, policy: Policy, most_rows: int) -> None:
        """most_drafts: limit of a request's drafts in a step. most_rows: limit of a step's newest tokens and drafts,
        each of which has a row of logits.
        """
        self._proposer, self._most_drafts, self._most_rows = proposer, most_drafts, most_rows
        self._cache, self._policy = cache, policy
        self._times = StepTimes()
        self._drafted: list[Request] = []
        self._counts: dict[str, list[int]] = {}
        self._outcomes: Counter[Outcome] = Counter()
        # Why a step planned while another one is in flight has no drafts. Beside prompts, `expects` is not called.
        self._foreseen: Outcome = "prompts"
        self.is_catching_up = False  # whether the proposer caught up with requests in the last plan

    def expects(self, requests: Collection[Request]) -> bool:
        """Return whether drafts are likely to raise the tokens per second of the requests' next step.

        The requests' newest tokens are in flight; drafts need them read before the step is planned.
        """
        number = len(requests)
        if (obstacle := self._obstacle(number)) is not None:
            self._foreseen = obstacle
            return False
        has_chances, may_catch_up = False, self._times.may_catch_up(number)
        for request in requests:
            chance = self._proposer.foresee(request, may_catch_up=may_catch_up) if request.can_draft else 0.0
            if chance and self._times.pays(chance, number, 0, number):
                return True
            has_chances |= chance > 0
        if has_chances:
            self._times.forget(number)
        self._foreseen = "cost" if has_chances else self._reason(requests)
        return False

    def extend(self, plan: MutableMapping[Request, int], num_decodes: int, *, may_draft: bool) -> bool:
        """Add drafts to a plan as long as they pay. Return whether a request has drafts, or had blocks for them.
        num_decodes: number of the plan's decodes; a plan with prompts too has no drafts. may_draft: whether all tokens
        of its requests are known, and no stream is left out.
        """
        self.is_catching_up, had_blocks = False, False
        if len(plan) > num_decodes:
            outcome: Outcome = "prompts"
        elif may_draft and num_decodes:
            outcome, had_blocks = self._draft(plan, num_decodes)
        else:
            outcome = self._foreseen
        if num_decodes:
            self._outcomes[outcome] += 1
        self._foreseen = "prompts"
        return had_blocks

    def _draft(self, plan: MutableMapping[Request, int], num_decodes: int) -> tuple[Outcome, bool]:
        """Add drafts to a plan of decodes. Return also whether a request had blocks for them."""
        if (obstacle := self._obstacle(num_decodes)) is not None:
            return obstacle, False
        may_catch_up = self._times.may_catch_up(num_decodes)
        chances = {r: self._chances(r, may_catch_up) for r in plan if r.can_draft}
        chosen = self._choose(chances, num_decodes)
        if not chosen:
            return "cost" if any(chances.values()) else self._reason(plan), False
        numbers = {r: room for r, number in chosen.items() if (room := self._make_room(r, number))}
        if not numbers:
            return "no_room", False
        for request, proposal in self._proposer.propose(numbers).items():
            self._plan(request, proposal, plan)
        self.is_catching_up = self._proposer.is_catching_up
        if any(request.num_drafted for request in numbers):
            return "drafted", True
        return "catching_up" if self.is_catching_up else "no_proposal", True

    def confirm(self, moved: Iterable[Request]) -> list[Request]:
        """Return the requests whose newest token is their next draft. The step has computed it, so the token after it
        can be committed. Drop the other requests' drafts.
        """
        accepted = []
        for request in moved:
            if not request.drafts:
                continue
            if request.status is Status.RUNNING and request.drafts.pop(0) == request.token_ids[-1]:
                self._policy.add_service(request, step_cost(request, 1) - DRAFT)
                self._count(request)[1] += 1
                accepted.append(request)
            else:
                request.drafts.clear()
        return accepted

    def end_step(self) -> int:
        """Release what rejected drafts hold. Return the number of drafts that the step had."""
        number = 0
        for request in self._drafted:
            number += request.num_drafted
            request.drafts.clear()
            request.num_drafted = 0
            if request.status is Status.RUNNING:
                self._cache.truncate(request, request.num_tokens)
        self._drafted = []
        return number

    def observe(self, seconds: float, num_decodes: int, num_drafts: int, num_tokens: int, is_catching_up: bool) -> None:
        """Record a step without prompts (see `StepTimes`). num_tokens: number of new tokens."""
        self._times.observe(seconds, num_decodes, num_drafts, num_tokens, is_catching_up)

    def counts(self) -> tuple[DraftCount, ...]:
        """Return the drafts since the engine's start by adapter."""
        return tuple(DraftCount(adapter, *counts) for adapter, counts in self._counts.items())

    def outcomes(self) -> dict[Outcome, int]:
        """Return the steps with decodes since the engine's start by what became of drafts."""
        return dict(self._outcomes)

    def _obstacle(self, num_decodes: int) -> Outcome | None:
        """Return why no step with `num_decodes` decodes has drafts; None if its requests decide."""
        if num_decodes >= self._most_rows:
            return "no_room"
        if not self._times.may_draft(num_decodes):
            return "measuring"
        if self._times.pays(1.0, num_decodes, 0, num_decodes):
            return None
        self._times.forget(num_decodes)
        return "cost"

    def _reason(self, requests: Iterable[Request]) -> Outcome:
        """Return why requests have no chances: the reason of the first one whose answer has room for drafts."""
        wanting = (r for r in requests if r.can_draft and self._num_left(r) > 0)
        return next((self._proposer.reason(request) for request in wanting), "no_proposal")

    def _chances(self, request: Request, may_catch_up: bool) -> list[float]:
        """Return the probability that all of the request's first 1, 2, ... drafts are accepted."""
        most = max(0, min(self._most_drafts, self._num_left(request)))
        return self._proposer.chances(request, most, may_catch_up=may_catch_up)

    def _num_left(self, request: Request) -> int:
        """Return the number of tokens after the next one that the answer may have."""
        return request.params.max_tokens - request.num_output_tokens - 1

    def _choose(self, chances: Mapping[Request, list[float]], num_decodes: int) -> Mapping[Request, int]:
        """Return the number of drafts that pay, the likeliest first over all requests. A request's own drafts become
        less likely one after the other, so each draft comes after those before it.
        """
        drafts = [(chance, request) for request, each in chances.items() for chance in each]
        drafts.sort(key=lambda entry: -entry[0])
        expected, numbers = float(num_decodes), dict[Request, int]()
        for number, (chance, request) in enumerate(drafts[: max(0, self._most_rows - num_decodes)]):
            if not self._times.pays(chance, num_decodes, number, expected):
                break
            numbers[request] = numbers.get(request, 0) + 1
            expected += chance
        if drafts and not numbers:
            self._times.forget(num_decodes)
        return numbers

    def _make_room(self, request: Request, number: int) -> int:
        """Return how many of the drafts have room in the cache. Nothing gives way to a draft."""
        if self._cache.grow(request, request.num_tokens + number):
            return number
        return min(number, len(request.blocks) * self._cache.block_size - request.num_tokens)

    def _plan(self, request: Request, proposal: Proposal, plan: MutableMapping[Request, int]) -> None:
        drafts = proposal.drafts
        request.drafts, request.num_drafted = drafts, len(drafts)
        # Blocks without a draft are freed here: the next step may be planned while this one runs, and would count them
        # as the stream's.
        self._cache.truncate(request, request.num_tokens + len(drafts))
        self._drafted.append(request)
        self._count(request)[0] += len(drafts)
        plan[request] += len(drafts)
        cost = DRAFT * len(drafts)
        request.planned_cost += cost
        # The work of the proposal is done, whether the step runs or not.
        self._policy.add_service(request, cost + proposal.cost)

    def _count(self, request: Request) -> list[int]:
        """Return the counts of the request's adapter, drafted and accepted."""
        adapter = request.adapter_digest or ""
        if adapter not in self._counts and len(self._counts) >= COUNTED_ADAPTERS:
            adapter = OTHERS
        return self._counts.setdefault(adapter, [0, 0])


def is_doubtful(request: Request, token: int) -> bool:
    """Return whether a request's token may be NaN because of a draft after it: attention multiplies the values of later
    tokens by 0, and 0 times NaN is NaN. Then the token is void: drop its record and the request's drafts for good.
    """
    if token != NOT_FINITE or not request.drafts:
        return False
    request.drafts.clear()
    request.num_pending, request.can_draft = 0, False
    if request.params.logprobs is not None:
        del request.logprobs[-1]
    return True
