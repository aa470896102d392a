"""Counts of sequences within and beyond their target of the time to first token, of the engine and by tenant.

A request with `n` choices has `n` sequences here; the gateway counts it once.
"""

from collections.abc import Callable

from engine.scheduling.policies.policy import Policy
from engine.scheduling.request import FinishReason, Request


class TargetCounts:
    """The counts of one engine. Each sequence with a target is counted at most once.

    num_met: sequences whose first token came in time. num_missed: those whose first token came later, and those that
    ended without one. A client that leaves within its target is in neither, because the target was not missed yet.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        """clock: that of `Request.arrived_at`."""
        self.num_met = self.num_missed = 0
        self._policy, self._clock = policy, clock

    def count_token(self, request: Request, num_tokens: int) -> None:
        """Count a sequence that had `num_tokens` known tokens, if it has just received its first one or ended without
        one.
        """
        if request.ttft_target is not None and num_tokens == request.num_prompt_tokens:
            has_token = len(request.token_ids) > num_tokens
            self._count(request, is_met=has_token and not self._is_over(request, request.ttft_target))

    def count_end(self, request: Request, reason: FinishReason) -> None:
        """Count a sequence that ends between two steps, if it has no token. A token in flight is dropped."""
        target = request.ttft_target
        if target is None or len(request.token_ids) > request.num_prompt_tokens:
            return
        if reason != "abort" or self._is_over(request, target):
            self._count(request, is_met=False)

    def _is_over(self, request: Request, target: float) -> bool:
        return self._clock() - request.arrived_at > target

    def _count(self, request: Request, *, is_met: bool) -> None:
        self.num_met += is_met
        self.num_missed += not is_met
        self._policy.count_target(request, is_met=is_met)
