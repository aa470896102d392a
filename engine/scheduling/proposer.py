"""Sources of drafts: the interface, and prompt lookup. Independent of tensors."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from engine.scheduling.draft_acceptance import ADAPTER_WEIGHT, INITIAL_AFTER_SUCCESS, INITIAL_FIRST, DraftAcceptance
from engine.scheduling.prompt_lookup import PromptLookup
from engine.scheduling.request import Request
from wire.bounded_dict import BoundedDict

# Pairs of tenant and adapter whose rates are kept, the most recently used ones.
KEPT_RATES = 1024
# Why a request has no chances: the proposer is far behind with its text, or has no drafts for it.
Reason = Literal["catching_up", "no_proposal"]


class Proposal(NamedTuple):
    """A request's drafts. cost: the cost of the work to find them, in prompt tokens (see `engine.scheduling.cost`)."""

    drafts: list[int]
    cost: float = 0.0


class Proposer(Protocol):
    """Source of drafts for all requests of a step.

    is_catching_up: whether the last `propose` caught up with requests, so that the step's time means nothing.
    """

    @property
    def is_catching_up(self) -> bool: ...

    def chances(self, request: Request, most: int, *, may_catch_up: bool) -> list[float]:
        """Return the probability that all of the request's next 1, 2, ... drafts are accepted, for at most `most`
        drafts. Every earlier draft of the request has been accepted or dropped. may_catch_up: whether drafts may need
        more work than usual first.
        """
        ...

    def foresee(self, request: Request, *, may_catch_up: bool) -> float:
        """Return the probability that the request's next draft is accepted, where its newest token is in flight."""
        ...

    def reason(self, request: Request) -> Reason:
        """Return why a request has no chances, right after `chances` or `foresee` has returned none."""
        ...

    def propose(self, numbers: Mapping[Request, int]) -> Mapping[Request, Proposal]:
        """Return as many drafts as wanted, or fewer, for each of these requests. Called after `chances` in each step
        that may have drafts.
        """
        ...


class SharedRates:
    """Rates with which an adapter's next request begins. Tenants share none, so that no tenant's steps show the texts
    of another.
    """

    def __init__(self) -> None:
        self._rates = BoundedDict[tuple[str, str], DraftAcceptance](KEPT_RATES)

    def of(self, request: Request) -> DraftAcceptance:
        key = request.tenant_id, request.adapter_digest or ""
        rates = self._rates.get(key) or DraftAcceptance(INITIAL_FIRST, INITIAL_AFTER_SUCCESS)
        self._rates.put(key, rates)
        return rates


class PromptLookups:
    """Prompt lookup in each request's own text (`engine.scheduling.prompt_lookup`)."""

    is_catching_up = False

    def __init__(self, min_match: int, max_match: int) -> None:
        """min_match: number of last tokens that must occur earlier in the text. max_match: number of last tokens that
        are compared at most.
        """
        self._min_match, self._max_match = min_match, max_match
        self._rates = SharedRates()

    def chances(self, request: Request, most: int, *, may_catch_up: bool) -> list[float]:
        shared = self._rates.of(request)
        if request.lookup is None:
            request.lookup = PromptLookup(
                self._min_match, self._max_match, DraftAcceptance(shared.first, shared.after_success)
            )
        for is_true, is_first in request.lookup.follow(request.token_ids):
            shared.observe(is_true, is_first=is_first, weight=ADAPTER_WEIGHT)
        return request.lookup.chances(most) if most > 0 and request.lookup.find() else []

    def foresee(self, request: Request, *, may_catch_up: bool) -> float:
        """Return the probability that the token in flight and the one after it continue the occurrence found so far."""
        found = self.chances(request, 2, may_catch_up=may_catch_up)
        return found[1] if len(found) > 1 else 0.0

    def reason(self, request: Request) -> Reason:
        return "no_proposal"

    def propose(self, numbers: Mapping[Request, int]) -> dict[Request, Proposal]:
        return {
            request: Proposal([] if request.lookup is None else request.lookup.propose(number))
            for request, number in numbers.items()
        }
