"""Sums of usage by hour, day or month."""

from collections.abc import Mapping
from datetime import datetime

from gateway.records.usage.tenant_sums import SUMMED

Steps = dict[datetime, dict[str, int]]
"""Sums by SUMMED of all groups, by the start of their hour, day or month."""


def total_of(steps: Steps) -> dict[str, int]:
    """Return the sums of all steps."""
    return {name: sum(sums[name] for sums in steps.values()) for name in SUMMED}


def by_day(steps: Steps) -> Steps:
    """Return the sums of hours as sums of days."""
    found: Steps = {}
    for start, sums in steps.items():
        day = found.setdefault(start.replace(hour=0), dict.fromkeys(SUMMED, 0))
        for name, value in sums.items():
            day[name] += value
    return found


def measured(sums: Mapping[str, int], measure: str) -> int:
    """Return the value of a measure of SUMMED, or of "tokens"."""
    return sums["prompt_tokens"] + sums["completion_tokens"] if measure == "tokens" else sums[measure]
