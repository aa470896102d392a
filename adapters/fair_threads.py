"""A small pool of threads that is shared fairly between tenants.

Each tenant has a queue of its own. The tenant whose work has held threads for the least time lately is served next. No
tenant holds all threads, so a second tenant's work starts at once.
Knows nothing of the work.
"""

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

# Half-life of recent use, in seconds.
HALF_LIFE_S = 30.0
# Beyond this recent use a tenant's work runs at low priority, so that the engine's steps get the cores.
HEAVY_SECONDS = 1.0
# A job that runs for longer goes on at low priority, whoever its tenant is.
LONG_SECONDS = 0.25
HEAVY_NICE = 10
FORGOTTEN_SECONDS = 0.001


class TooManyPending(RuntimeError):
    """The queue, or the tenant's part of it, is full. The message says which."""


@dataclass(eq=False, slots=True)
class _Job:
    tenants: set[str]
    work: Callable[[], Any]
    future: "Future[Any]"
    started: float = field(default=0.0)


class FairThreads:
    """Runs at most `num_threads` jobs at once, and leaves a thread free by each tenant. Thread-safe.

    max_pending, max_pending_per_tenant: jobs that may wait for a thread.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        max_pending: int,
        max_pending_per_tenant: int,
        lowers_priority: bool = True,
    ) -> None:
        self._num_threads, self._name, self._lowers_priority = num_threads, name, lowers_priority
        self._max_pending, self._max_pending_per_tenant = max_pending, max_pending_per_tenant
        self._lock = threading.Lock()
        self._queues: dict[str, deque[_Job]] = {}
        self._running: set[_Job] = set()
        self._threads: set[threading.Thread] = set()
        # Seconds by tenant at a moment; they decay from there.
        self._used: dict[str, tuple[float, float]] = {}
        self._num_pending = 0
        self._closed = False

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, tenant: str, work: Callable[[], T], *, bounded: bool = True) -> "Future[T]":
        """Queue work for a tenant. Cancelling the future before its start removes it from the queue.

        Raises TooManyPending, unless `bounded` is false, and RuntimeError once closed.
        """
        job = _Job(set(), work, Future())
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads are closed")
            if bounded and len(self._queues.get(tenant, ())) >= self._max_pending_per_tenant:
                raise TooManyPending(f"{self._max_pending_per_tenant} of this tenant's wait already, the most allowed")
            if bounded and self._num_pending >= self._max_pending:
                raise TooManyPending(f"{self._max_pending} wait already, the most allowed")
            self._num_pending += 1
            self._enqueue(tenant, job)
            job.future.add_done_callback(lambda _: self._left(job))
            self._start_jobs()
        return job.future

    def share(self, tenant: str, future: "Future[Any]") -> None:
        """Queue a waiting job for a further tenant that needs it; it runs at whichever turn comes first."""
        with self._lock:
            job = next((job for queue in self._queues.values() for job in queue if job.future is future), None)
            if job is not None and tenant not in job.tenants:
                self._enqueue(tenant, job)
                self._start_jobs()

    def is_heavy(self, tenant: str) -> bool:
        """Return whether the tenant's work runs at low priority now."""
        with self._lock:
            return self._use(tenant, time.monotonic()) > HEAVY_SECONDS

    def close(self, *, wait: bool = True) -> None:
        """Cancel the waiting jobs; wait for the running ones if asked to."""
        with self._lock:
            self._closed = True
            waiting = {job for queue in self._queues.values() for job in queue}
            threads = list(self._threads)
        for job in waiting:
            job.future.cancel()
        for thread in threads if wait else ():
            thread.join()

    # The methods below are called with the lock held.

    def _enqueue(self, tenant: str, job: _Job) -> None:
        job.tenants.add(tenant)
        self._queues.setdefault(tenant, deque()).append(job)

    def _dequeue(self, job: _Job) -> bool:
        """Remove a job from every queue. Returns False if it is in none."""
        found = False
        for tenant in job.tenants:
            queue = self._queues.get(tenant)
            if queue is not None and job in queue:
                found = True
                queue.remove(job)
                if not queue:
                    del self._queues[tenant]
        self._num_pending -= found
        return found

    def _start_jobs(self) -> None:
        while len(self._running) < self._num_threads and not self._closed:
            now = time.monotonic()
            held = Counter(tenant for job in self._running for tenant in job.tenants)
            most = max(1, self._num_threads - 1)
            turns = [tenant for tenant in self._queues if held[tenant] < most]
            if not turns:
                return
            tenant = min(turns, key=lambda tenant: (self._use(tenant, now), held[tenant]))
            job = self._queues[tenant][0]
            self._dequeue(job)
            # The tenant whose turn it is pays.
            job.tenants, job.started = {tenant}, now
            self._running.add(job)
            heavy = self._lowers_priority and self._use(tenant, now) > HEAVY_SECONDS
            thread = threading.Thread(target=self._run, args=(job, heavy), name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _use(self, tenant: str, now: float) -> float:
        """Return the seconds of threads that the tenant has used recently, including its running jobs."""
        seconds, at = self._used.get(tenant, (0.0, now))
        running = sum(now - job.started for job in self._running if tenant in job.tenants)
        return float(seconds * 0.5 ** ((now - at) / HALF_LIFE_S)) + running

    def _charge(self, job: _Job, now: float) -> None:
        self._running.discard(job)
        for tenant in job.tenants:
            self._used[tenant] = self._use(tenant, now) + now - job.started, now
        for tenant in [tenant for tenant in self._used if self._use(tenant, now) < FORGOTTEN_SECONDS]:
            del self._used[tenant]

    # The methods below take the lock.

    def _left(self, job: _Job) -> None:
        """Remove a cancelled job from the queues."""
        if job.future.cancelled():
            with self._lock:
                self._dequeue(job)

    def _run(self, job: _Job, heavy: bool) -> None:
        if heavy:
            _lower_priority(threading.get_native_id())
        slow_down = threading.Timer(LONG_SECONDS, self._slow_down, (job, threading.get_native_id()))
        slow_down.daemon = True
        slow_down.start()
        try:
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.work()
                except BaseException as exc:  # noqa: BLE001 - handed to whoever waits, panics of Rust code too
                    job.future.set_exception(exc)
                else:
                    job.future.set_result(result)
        finally:
            slow_down.cancel()
            with self._lock:
                self._charge(job, time.monotonic())
                self._threads.discard(threading.current_thread())
                self._start_jobs()

    def _slow_down(self, job: _Job, thread_id: int) -> None:
        """Lower the priority of a job's thread while it runs. A thread serves one job, so no other inherits it."""
        with self._lock:  # the job's thread does not end while this holds it
            if job in self._running:
                _lower_priority(thread_id)


def _lower_priority(thread_id: int) -> None:
    """Lower this thread's priority. Linux only: elsewhere threads have no priority of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, thread_id, HEAVY_NICE)
