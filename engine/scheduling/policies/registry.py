"""Scheduling policies by the name in `--scheduler`."""

from typing import assert_never

from engine.config import PolicyName
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.fcfs import FirstCome
from engine.scheduling.policies.policy import Policy


def make_policy(name: PolicyName, *, slack: float, preempt_behind: float, preempt_after: float) -> Policy:
    """Return a new policy. The numbers are those of `FairShare`; other policies have no use for them."""
    match name:
        case "fair":
            return FairShare(slack, preempt_behind, preempt_after)
        case "fcfs":
            return FirstCome()
    assert_never(name)
