"""Threads of tenants' jobs in a process whose own priority is low already."""

import os
import sys
import threading
import time

import pytest

from adapters.fair_threads import LONG_SECONDS, FairThreads, Yielding

TIMEOUT = 60


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own elsewhere")
def test_jobs_go_on_after_long_and_heavy_ones(monkeypatch: pytest.MonkeyPatch):
    """Only a privileged process may raise a priority."""
    yielding, is_watched = Yielding(after_seconds=0.01, rest=1.0), threading.Event()

    def refuse(*_: int) -> None:
        is_watched.set()
        raise PermissionError

    def get(*_: int) -> int:
        is_watched.set()
        return 19

    def work() -> None:
        end = time.thread_time() + LONG_SECONDS
        while time.thread_time() < end:
            pass
        assert is_watched.wait(TIMEOUT)

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(os, "getpriority", get)
    pool = FairThreads(1, "test", max_pending=9, max_pending_per_tenant=9, yielding=yielding)
    pool.submit("greedy", work).result(TIMEOUT)
    # The tenant's rest ends, and its next job, which has low priority, runs.
    assert pool.submit("greedy", lambda: 1).result(10) == 1
    pool.close()
