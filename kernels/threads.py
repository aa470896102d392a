"""Number of threads that a process may keep busy: the CPUs it may run on, within its container's quota."""

import math
import os
from pathlib import Path

from kernels.cgroups import cgroups, read


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the CPUs of the affinity mask, or fewer if a cgroup (version 1 or 2) allows less CPU time; at least 1.

    Threads beyond a quota slow the process down: they use up the quota by spinning, and then all threads stop for the
    rest of the period. root: directory where proc and sys are mounted.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> list[float]:
    """Return the CPUs that each cgroup of this process allows, its own and its parents'. Skips unreadable ones."""
    return [quota for group in cgroups("cpu", root) for quota in _quota_of(group)]


def _quota_of(group: Path) -> list[float]:
    fields = read(group / "cpu.max").split() or [
        read(group / "cpu.cfs_quota_us").strip(), read(group / "cpu.cfs_period_us").strip()
    ]  # fmt: skip
    try:
        quota, period = (float(field) for field in fields)
    except ValueError:
        return []  # "max": no limit
    return [quota / period] if quota > 0 and period > 0 else []
