"""Speculative decoding: drafts of the next tokens, which a step computes beside the newest token of a request.

A draft is accepted if it equals the token that the sampler draws at its place, after everything before it is committed:
grammar, penalties, seeds and stop tokens see the same state as without drafts, so no answer changes. Only steps without
prompts have drafts. Their number follows from measured times: a draft is planned if its probability of being accepted
is worth the time that it adds. Knows no tensors.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import NamedTuple

from engine.scheduling.cost import DRAFT, step_cost
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.policies.policy import Policy
from engine.scheduling.prompt_lookup import PromptLookup, Rates
from engine.scheduling.request import NOT_FINITE, Request, Status
from engine.scheduling.step_times import StepTimes
from engine.speculative_config import SpeculativeConfig

# Rates of an adapter's first request, and the weight of a prediction in the rates of an adapter's next request.
FIRST_FRESH, FIRST_NEXT = 0.5, 0.8
OF_ADAPTER = 0.02
# Pairs of tenant and adapter whose rates are kept, the most recently used ones.
KEPT_RATES = 1024
# Adapters with counts of their own; further ones share the counts of OTHERS.
COUNTED_ADAPTERS = 50
OTHERS = "others"


class DraftCount(NamedTuple):
    """Drafts computed for an adapter's requests, and accepted ones. adapter: digest, "" for the base, or OTHERS."""

    adapter: str
    drafted: int
    accepted: int


class Drafter:
    """Source and judge of an engine's drafts. Call its methods in this order: `extend` at the end of a plan, `confirm`
    after each commit, `end_step`, `observe`.
    """

    def __init__(self, config: SpeculativeConfig, cache: KVCache, policy: Policy, most_rows: int) -> None:
        """most_rows: limit of a step's newest tokens and drafts, each of which has a row of logits."""
        self._config, self._cache, self._policy, self._most_rows = config, cache, policy, most_rows
        self._times = StepTimes()
        self._rates: OrderedDict[tuple[str, str], Rates] = OrderedDict()
        self._drafted: list[Request] = []
        self._counts: dict[str, list[int]] = {}

    def extend(self, plan: MutableMapping[Request, int]) -> None:
        """Add drafts to a plan that has decodes only, as long as they pay."""
        num_decodes = len(plan)
        if not self._times.may_draft(num_decodes):
            return
        if not self._times.pays(1.0, num_decodes, 0, num_decodes):
            self._times.forget(num_decodes)
            return
        chosen = self._choose([(r, *self._propose(r)) for r in plan if r.can_draft], num_decodes)
        for request, drafts in chosen.items():
            if drafts := self._make_room(request, drafts):
                self._plan(request, drafts, plan)

    def confirm(self, moved: Iterable[Request]) -> list[Request]:
        """Return the requests whose newest token is their next draft. The step has computed it, so the token after it
        can be sampled. Drop the other requests' drafts.
        """
        accepted = []
        for request in moved:
            if not request.drafts:
                continue
            if request.status is Status.RUNNING and request.drafts.pop(0) == request.token_ids[-1]:
                self._policy.charge(request, step_cost(request, 1) - DRAFT)
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

    def observe(self, seconds: float, num_decodes: int, num_drafts: int) -> None:
        """Record the time of a step without prompts."""
        self._times.observe(seconds, num_decodes, num_drafts)

    def counts(self) -> tuple[DraftCount, ...]:
        """Return the drafts since the engine's start by adapter."""
        return tuple(DraftCount(adapter, *counts) for adapter, counts in self._counts.items())

    def _propose(self, request: Request) -> tuple[list[int], list[float]]:
        """Return a request's drafts, and the probability that all up to each of them are accepted."""
        shared = self._shared_rates(request)
        if request.lookup is None:
            rates = Rates(shared.fresh, shared.next)
            request.lookup = PromptLookup(self._config.prompt_lookup_min, self._config.prompt_lookup_max, rates)
        lookup = request.lookup
        for is_true, is_fresh in lookup.follow(request.token_ids):
            shared.observe(is_true, is_fresh=is_fresh, weight=OF_ADAPTER)
        left = request.params.max_tokens - request.num_output_tokens - 1
        drafts = lookup.propose(min(self._config.num_speculative_tokens, left)) if left > 0 else []
        return drafts, lookup.chances(len(drafts))

    def _shared_rates(self, request: Request) -> Rates:
        """Return the rates of the request's adapter. Tenants share none, so that no tenant's steps show the texts of
        another.
        """
        key = request.tenant_id, request.adapter_digest or ""
        rates = self._rates.setdefault(key, Rates(FIRST_FRESH, FIRST_NEXT))
        self._rates.move_to_end(key)
        if len(self._rates) > KEPT_RATES:
            self._rates.popitem(last=False)
        return rates

    def _choose(
        self, proposed: list[tuple[Request, list[int], list[float]]], num_decodes: int
    ) -> Mapping[Request, list[int]]:
        """Return the drafts that pay, the likeliest first over all requests. A request's own drafts become less likely
        one after the other, so each draft comes after those before it.
        """
        chances = [(chance, i) for i, (_, _, each) in enumerate(proposed) for chance in each]
        chances.sort(key=lambda entry: -entry[0])
        expected, numbers = float(num_decodes), [0] * len(proposed)
        for number, (chance, i) in enumerate(chances[: max(0, self._most_rows - num_decodes)]):
            if not self._times.pays(chance, num_decodes, number, expected):
                break
            numbers[i] += 1
            expected += chance
        if chances and not any(numbers):
            self._times.forget(num_decodes)
        return {request: drafts[:n] for (request, drafts, _), n in zip(proposed, numbers, strict=True) if n}

    def _make_room(self, request: Request, drafts: list[int]) -> list[int]:
        """Return the drafts that have room in the cache. Nothing gives way to a draft."""
        if not self._cache.grow(request, request.num_tokens + len(drafts)):
            del drafts[len(request.blocks) * self._cache.block_size - request.num_tokens :]
        return drafts

    def _plan(self, request: Request, drafts: list[int], plan: MutableMapping[Request, int]) -> None:
        request.drafts, request.num_drafted = drafts, len(drafts)
        self._drafted.append(request)
        self._count(request)[0] += len(drafts)
        plan[request] += len(drafts)
        cost = DRAFT * len(drafts)
        request.charged += cost
        self._policy.charge(request, cost)

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
