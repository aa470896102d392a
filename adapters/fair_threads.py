"""A small thread pool shared fairly between tenants.

Each tenant has its own queue. The next job comes from the tenant whose jobs recently used the least thread time per
weight. No tenant occupies all threads, so a second tenant's work starts at once. A limit of CPU time bounds a tenant's
share of the cores. Independent of the work.

Threads start without the handshake of `threading.Thread.start`, which waits until the new thread runs: on busy cores
that takes 5 ms and up to 100, in which an event loop that submits a job would stand still.
"""

import errno
import math
import os
import sys
import threading
import time
from _thread import start_new_thread
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adapters.decaying_sums import DecayingSums

T = TypeVar("T")

# Half-life of recent use, in seconds.
HALF_LIFE_S = 30.0
# A job that runs longer than this continues at low priority, regardless of its tenant.
LONG_SECONDS = 0.05
# Maximum rest after a job, in seconds, so that a slow job does not delay its tenant for long.
MAX_REST_SECONDS = 2.0


@dataclass(frozen=True)
class Yielding:
    """Priority and pauses of jobs that share the cores with more urgent work.

    after_seconds: recent thread time above which a tenant is heavy. nice: niceness of the threads of heavy tenants and
    of long jobs. rest: after a job, a heavy tenant's next job waits for `rest` times the job's CPU time, at most
    `MAX_REST_SECONDS`. Short jobs that run one after the other thus take at most 1 / (1 + rest) of a core. Niceness
    alone does not suffice: a step's threads wait for each other, for less than a millisecond at a time, and the kernel
    lets a thread that runs in between finish its slice of several milliseconds.
    """

    after_seconds: float = 1.0
    nice: int = 10
    rest: float = 0.0


class TooManyPending(RuntimeError):
    """The queue or the tenant's share of it is full, or the tenant's CPU time is used up. The message names the limit.

    is_tenants: the tenant's own limit is reached. retry_after: seconds until there may be capacity.
    """

    def __init__(self, message: str, *, is_tenants: bool, retry_after: int = 1) -> None:
        super().__init__(message)
        self.is_tenants = is_tenants
        self.retry_after = retry_after


@dataclass(eq=False, slots=True)
class _Job:
    """Work for a thread, and the tenants that wait for it.

    started: when its thread began it, 0 before. rests: whether a heavy tenant rests after it.
    """

    tenants: set[str]
    work: Callable[[], Any]
    future: "Future[Any]"
    started: float = field(default=0.0)
    # Native id of its thread, once the thread runs.
    thread_id: int = field(default=0)
    has_low_priority: bool = field(default=False)
    rests: bool = field(default=True)


class FairThreads:
    """A pool that runs at most `num_threads` jobs at once. Thread-safe.

    A tenant occupies at most `num_threads - 1` threads, but at least one.
    max_pending, max_pending_per_tenant: maximum number of waiting jobs. yielding: how heavy tenants' jobs yield;
    None: they keep their priority. max_cpu_seconds: maximum recent CPU time of a tenant's jobs. It halves every
    `HALF_LIFE_S`, so this also limits the rate: 2.3 % of it per second.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        max_pending: int,
        max_pending_per_tenant: int,
        yielding: Yielding | None = Yielding(),
        max_cpu_seconds: float | None = None,
    ) -> None:
        self._max_cpu_seconds = max_cpu_seconds
        self._num_threads, self._name, self._yielding = num_threads, name, yielding
        self._max_pending, self._max_pending_per_tenant = max_pending, max_pending_per_tenant
        self._lock = threading.Lock()
        self._job_ended = threading.Condition(self._lock)
        # Whether the watcher's thread exists, and the time (monotonic) until which it waits.
        self._is_watched, self._waits_until = False, 0.0
        self._wait_changed = threading.Condition(self._lock)
        self._queues: dict[str, deque[_Job]] = {}
        # Weights of the tenants with waiting jobs, as last given.
        self._weights: dict[str, float] = {}
        self._running: set[_Job] = set()
        # Thread seconds, for turns and priority, and CPU time, for the limit.
        self._used, self._cpu_used = DecayingSums(HALF_LIFE_S), DecayingSums(HALF_LIFE_S)
        # Tenants whose next job may not start yet, and the time (monotonic) from which it may.
        self._rests: dict[str, float] = {}
        self._num_pending = 0
        self._closed = False

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(
        self,
        tenant_id: str,
        work: Callable[[], T],
        *,
        bounded: bool = True,
        rests: bool = True,
        weight: float | None = None,
    ) -> "Future[T]":
        """Queue work for a tenant. Cancelling the future before its start removes the job from the queue.

        rests: whether a heavy tenant rests after the job. weight: the tenant's share of the threads relative to others,
        above 0. None: as given for its other waiting jobs, else 1.
        Raises TooManyPending, unless `bounded` is false, and RuntimeError once closed. The future raises TooManyPending
        if the tenant's CPU time is used up before its turn, and OSError (ENOMEM) if the system starts no thread.
        """
        job = _Job(set(), work, Future(), rests=rests)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._name} threads are closed")
            if bounded:
                self._check_cpu(tenant_id)
            if bounded and len(self._queues.get(tenant_id, ())) >= self._max_pending_per_tenant:
                message = f"{self._max_pending_per_tenant} requests of this tenant wait already, which is the limit"
                raise TooManyPending(message, is_tenants=True)
            if bounded and self._num_pending >= self._max_pending:
                raise TooManyPending(f"{self._max_pending} requests wait already, which is the limit", is_tenants=False)
            self._num_pending += 1
            self._enqueue(tenant_id, job, weight)
            job.future.add_done_callback(self._left)
            self._start_jobs()
        return job.future

    def share(self, tenant_id: str, future: "Future[Any]", *, weight: float | None = None) -> None:
        """Queue a waiting job for another tenant that needs it too; it runs at whichever turn comes first."""
        with self._lock:
            job = self._waiting(future)
            if job is not None and tenant_id not in job.tenants:
                self._enqueue(tenant_id, job, weight)
                self._start_jobs()

    def withdraw(self, tenant_id: str, future: "Future[Any]") -> None:
        """Undo `share`, or the `submit` of a job that another tenant shares. No effect once the job runs."""
        with self._lock:
            job = next((job for job in self._queues.get(tenant_id, ()) if job.future is future), None)
            if job is not None:
                job.tenants.remove(tenant_id)
                self._take_out(tenant_id, job)

    def charge(self, tenant_id: str, cpu_seconds: float) -> None:
        """Count CPU time that a tenant's job caused elsewhere."""
        with self._lock:
            self._cpu_used.add(tenant_id, cpu_seconds)

    def rest(self, tenant_id: str, seconds: float) -> None:
        """Let no further job of the tenant start for `seconds` after earlier rests, but at most MAX_REST_SECONDS."""
        with self._lock:
            self._delay(tenant_id, seconds)

    def is_heavy(self, tenant_id: str) -> bool:
        """Return whether the tenant's work currently runs at low priority."""
        with self._lock:
            return self._is_heavy(tenant_id, time.monotonic())

    def close(self, *, wait: bool = True) -> None:
        """Cancel the waiting jobs; with `wait`, also wait for the running ones."""
        with self._lock:
            self._closed = True
            waiting = {job for queue in self._queues.values() for job in queue}
        for job in waiting:
            job.future.cancel()
        with self._lock:
            while wait and self._running:
                self._job_ended.wait()

    # The methods below require the lock.

    def _waiting(self, future: "Future[Any]") -> _Job | None:
        return next((job for queue in self._queues.values() for job in queue if job.future is future), None)

    def _enqueue(self, tenant_id: str, job: _Job, weight: float | None) -> None:
        job.tenants.add(tenant_id)
        self._queues.setdefault(tenant_id, deque()).append(job)
        self._weights[tenant_id] = self._weights.get(tenant_id, 1.0) if weight is None else weight

    def _dequeue(self, job: _Job) -> None:
        """Remove a job from every queue, if it is in any."""
        found = [self._take_out(tenant_id, job) for tenant_id in job.tenants]
        self._num_pending -= any(found)

    def _take_out(self, tenant_id: str, job: _Job) -> bool:
        """Remove a job from a tenant's queue. Return whether it was in it."""
        queue = self._queues.get(tenant_id)
        if queue is None or job not in queue:
            return False
        queue.remove(job)
        if not queue:
            del self._queues[tenant_id], self._weights[tenant_id]
        return True

    def _start_jobs(self) -> None:
        while len(self._running) < self._num_threads and not self._closed:
            now = time.monotonic()
            held = Counter(tenant_id for job in self._running for tenant_id in job.tenants)
            most = max(1, self._num_threads - 1)
            turns = [tenant_id for tenant_id in self._queues if held[tenant_id] < most and tenant_id not in self._rests]
            if not turns:
                return
            tenant_id = min(turns, key=lambda t: (self._use(t, now) / self._weights[t], held[t] / self._weights[t]))
            job = self._queues[tenant_id][0]
            self._dequeue(job)
            if not self._may_start(tenant_id, job):
                continue
            # Charge only the tenant that has the turn.
            job.tenants, job.started = {tenant_id}, now
            job.has_low_priority = self._is_heavy(tenant_id, now)
            self._running.add(job)
            try:
                start_new_thread(self._run, (job,))
            except RuntimeError:
                self._running.discard(job)
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(OSError(errno.ENOMEM, "the system starts no further thread"))
            else:
                if self._yielding is not None:
                    self._watch_at(now + LONG_SECONDS)

    def _use(self, tenant_id: str, now: float) -> float:
        """Return the thread seconds that the tenant has used recently, including its running jobs."""
        return self._used.of(tenant_id) + sum(now - job.started for job in self._running if tenant_id in job.tenants)

    def _is_heavy(self, tenant_id: str, now: float) -> bool:
        return self._yielding is not None and self._use(tenant_id, now) > self._yielding.after_seconds

    def _charge(self, job: _Job, seconds: float, cpu_seconds: float) -> None:
        self._running.discard(job)
        for tenant_id in job.tenants:
            self._used.add(tenant_id, seconds)
            self._cpu_used.add(tenant_id, cpu_seconds)
            if job.rests:
                self._rest(tenant_id, cpu_seconds)

    def _rest(self, tenant_id: str, cpu_seconds: float) -> None:
        """Delay the start of a heavy tenant's next job. Work without a tenant ("") is not delayed."""
        if self._yielding is not None and tenant_id and self._is_heavy(tenant_id, time.monotonic()):
            self._delay(tenant_id, self._yielding.rest * cpu_seconds)

    def _delay(self, tenant_id: str, seconds: float) -> None:
        now = time.monotonic()
        until = min(max(now, self._rests.get(tenant_id, now)) + seconds, now + MAX_REST_SECONDS)
        if until > now and self._watch_at(until):
            self._rests[tenant_id] = until

    def _watch_at(self, when: float) -> bool:
        """Let the watcher check the jobs and rests at this time (monotonic). Return whether there is a watcher.

        Without a watcher, jobs keep their priority, and rests would not end.
        """
        if not self._is_watched:
            try:
                start_new_thread(self._watch, ())
            except RuntimeError:  # the system starts no further thread
                return False
            self._is_watched = True
        elif when < self._waits_until:
            self._waits_until = when
            self._wait_changed.notify()
        return True

    def _check_cpu(self, tenant_id: str) -> None:
        """Raise TooManyPending if the tenant's CPU time is used up. Work of no tenant ("") has no limit."""
        if (
            self._max_cpu_seconds is None
            or not tenant_id
            or (used := self._cpu_used.of(tenant_id)) < self._max_cpu_seconds
        ):
            return
        raise TooManyPending(
            f"this tenant used {used:.1f} s of CPU time recently; {self._max_cpu_seconds:g} s are allowed",
            is_tenants=True,
            retry_after=max(1, math.ceil(HALF_LIFE_S * math.log2(used / self._max_cpu_seconds))),
        )

    def _may_start(self, tenant_id: str, job: _Job) -> bool:
        """Refuse a job whose tenant used up its CPU time with other jobs while it waited."""
        try:
            self._check_cpu(tenant_id)
        except TooManyPending as error:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
            return False
        return True

    # The methods below take the lock.

    def _watch(self) -> None:
        """Lower the priority of jobs that run long, end rests, and start the jobs after those of low priority, until no
        job runs.
        """
        with self._lock:
            while True:
                now = time.monotonic()
                self._rests = {tenant_id: until for tenant_id, until in self._rests.items() if until > now}
                self._start_jobs()
                yielding = [] if self._yielding is None else self._running
                if not (yielding or self._rests):
                    self._is_watched = False
                    return
                times = list(self._rests.values())
                for job in yielding:
                    is_long = job.started + LONG_SECONDS <= now
                    if is_long and job.thread_id and not job.has_low_priority:
                        # The job's thread cannot end while the lock is held.
                        self._lower_priority(job.thread_id)
                        job.has_low_priority = True
                    if not job.has_low_priority:
                        times.append((now if is_long else job.started) + LONG_SECONDS)
                self._waits_until = min(times, default=math.inf)
                self._wait_changed.wait(self._waits_until - now if times else None)

    def _left(self, future: "Future[Any]") -> None:
        """Remove a cancelled job from the queues."""
        if future.cancelled():
            with self._lock:
                if (job := self._waiting(future)) is not None:
                    self._dequeue(job)

    def _run(self, job: _Job) -> None:
        if job.has_low_priority:
            self._lower_priority(threading.get_native_id())
        job.thread_id = threading.get_native_id()
        try:
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.work()
                except BaseException as exc:  # noqa: BLE001 - passed on to the callers, panics of Rust too
                    job.future.set_exception(exc)
                else:
                    job.future.set_result(result)
        finally:
            with self._lock:
                self._charge(job, time.monotonic() - job.started, time.thread_time())
                # A new thread has the priority of the one that starts it.
                if not (job.has_low_priority and self._watch_at(0.0)):
                    self._start_jobs()
                self._job_ended.notify_all()

    def _lower_priority(self, thread_id: int) -> None:
        """Lower the priority of this thread. Linux only: elsewhere threads have no priority of their own."""
        if sys.platform != "linux" or self._yielding is None:
            return
        # The whole process may have a lower priority already, which only a privileged one may raise.
        if os.getpriority(os.PRIO_PROCESS, thread_id) < self._yielding.nice:
            os.setpriority(os.PRIO_PROCESS, thread_id, self._yielding.nice)
