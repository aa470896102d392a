"""Scheduling policies by the name in `--scheduler`. Each one takes its own options from the configuration."""

from collections.abc import Callable

from engine.config import EngineConfig, PolicyName
from engine.scheduling.policies.fair_share import FairShare
from engine.scheduling.policies.fcfs import FirstCome
from engine.scheduling.policies.policy import Policy

POLICIES: dict[PolicyName, Callable[[EngineConfig], Policy]] = {
    "fair": lambda config: FairShare(config.fair_slack, config.preempt_behind, config.preempt_after),
    "fcfs": lambda _: FirstCome(),
}


def make_policy(config: EngineConfig) -> Policy:
    """Return a new policy of the configured kind."""
    return POLICIES[config.scheduler](config)
