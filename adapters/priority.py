"""Low scheduling priority for processes that do one tenant's work on a machine that serves all tenants."""

import os
from contextlib import suppress

LOW_NICE, LEAST_NICE = 10, 19


def lower(*, only_idle: bool) -> None:
    """Lower this process's priority. Call it before other threads start.

    only_idle: use SCHED_IDLE, so that any other process's thread that becomes ready gets the core at once. With
    niceness alone, this process keeps the core for some milliseconds. Without SCHED_IDLE, the highest niceness is set.
    """
    os.nice(LEAST_NICE if only_idle else LOW_NICE)
    if only_idle and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # a sandbox may refuse the call
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
