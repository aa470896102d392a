"""Threads shared by tenants: turns by recent use, a thread kept free, bounds, and cancellation."""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from adapters import decaying_sums, fair_threads
from adapters.fair_threads import FairThreads, TooManyPending, Yielding

TIMEOUT = 60
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own elsewhere")
WITH_NORMAL_PRIORITY = pytest.mark.skipif(
    sys.platform == "linux" and os.getpriority(os.PRIO_PROCESS, 0) >= Yielding().nice,
    reason="the tests themselves have a low priority",
)


@pytest.fixture
def threads():
    pool = FairThreads(3, "test", max_pending=100, max_pending_per_tenant=50)
    yield pool
    pool.close()


class Gate:
    """Work that waits until the gate opens, and records the names in order."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.open = threading.Event()

    def work(self, name: str, wait: bool = True):
        def run() -> str:
            self.ran.append(name)
            assert not wait or self.open.wait(TIMEOUT)
            return name

        return run


def until(condition) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_second_tenant_starts_at_once_behind_many_of_the_first(threads):
    gate = Gate()
    greedy = [threads.submit("greedy", gate.work("greedy")) for _ in range(48)]
    assert threads.submit("neighbour", gate.work("neighbour", wait=False)).result(TIMEOUT) == "neighbour"
    # A thread of the pool may have taken its job but not started it.
    until(lambda: gate.ran.count("greedy") == 2)
    gate.open.set()
    assert [job.result(TIMEOUT) for job in greedy] == ["greedy"] * 48


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of the pools and of recent use, which moves on request only."""
    now = [1000.0]
    for module in (decaying_sums, fair_threads):
        monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]}))
    return now


def test_turns_go_to_the_tenant_with_the_least_use(clock):
    pool, gate = FairThreads(1, "test", max_pending=100, max_pending_per_tenant=50), Gate()

    def work_long() -> None:
        clock[0] += 0.5

    try:
        pool.submit("heavy", work_long).result(TIMEOUT)
        blocker = pool.submit("blocker", gate.work("blocker"))
        order = ("heavy", "heavy", "light", "heavy", "light", "heavy")
        jobs = [pool.submit(tenant_id, gate.work(tenant_id, wait=False)) for tenant_id in order]
        gate.open.set()
        for job in (blocker, *jobs):
            job.result(TIMEOUT)
        assert gate.ran == ["blocker", "light", "light", "heavy", "heavy", "heavy", "heavy"]
    finally:
        gate.open.set()
        pool.close()


def test_turns_follow_the_tenants_weights(clock):
    """Jobs of equal length: a tenant of weight 3 has three turns for each turn of another."""
    pool = FairThreads(1, "test", max_pending=100, max_pending_per_tenant=50, yielding=None)
    gate, ran = Gate(), list[str]()

    def work(tenant_id: str):
        def run() -> None:
            clock[0] += 0.01
            ran.append(tenant_id)

        return run

    try:
        pool.submit("blocker", gate.work("blocker"))
        jobs = []
        for tenant_id, weight in (("one", 1.0), ("three", 3.0)):
            jobs += [pool.submit(tenant_id, work(tenant_id), weight=weight) for _ in range(30)]
            # A hint does not know the weight.
            jobs.append(pool.submit(tenant_id, work(tenant_id)))
        gate.open.set()
        for job in jobs:
            job.result(60)
        assert ran[:40].count("three") == pytest.approx(30, abs=1)
        assert not pool._weights
    finally:
        gate.open.set()
        pool.close()


def test_use_is_forgotten(threads, clock):
    def work() -> None:
        clock[0] += 0.02

    threads.submit("once", work).result(TIMEOUT)
    until(lambda: len(threads._used))
    clock[0] += 100 * fair_threads.HALF_LIFE_S
    threads.submit("other", int).result(TIMEOUT)
    until(lambda: not threads._running)
    assert threads._used.of("once") == 0
    assert len(threads._used) <= 1


def test_the_tenants_bound_and_the_whole_queues():
    pool, gate = FairThreads(2, "test", max_pending=5, max_pending_per_tenant=3), Gate()
    try:
        for _ in range(4):  # one runs, three wait
            pool.submit("a", gate.work("a"))
        with pytest.raises(TooManyPending, match="3 requests of this tenant wait"):
            pool.submit("a", gate.work("a"))
        for _ in range(3):  # one runs, two wait
            pool.submit("b", gate.work("b"))
        with pytest.raises(TooManyPending, match="5 requests wait already"):
            pool.submit("c", gate.work("c"))
        unbounded = pool.submit("c", gate.work("c"), bounded=False)
        gate.open.set()
        assert unbounded.result(TIMEOUT) == "c"
    finally:
        gate.open.set()
        pool.close()


def test_a_cancelled_job_leaves_its_place_to_others():
    pool, gate = FairThreads(2, "test", max_pending=5, max_pending_per_tenant=1), Gate()
    try:
        pool.submit("a", gate.work("first"))
        waiting = pool.submit("a", gate.work("second"))
        assert waiting.cancel()
        assert pool.num_pending == 0
        third = pool.submit("a", gate.work("third"))
        gate.open.set()
        assert third.result(TIMEOUT) == "third"
        assert gate.ran == ["first", "third"]
    finally:
        pool.close()


def burn(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def test_cpu_time_is_limited_by_tenant_and_given_back(clock):
    pool = FairThreads(2, "test", max_pending=50, max_pending_per_tenant=50, max_cpu_seconds=0.05)
    try:
        gate = Gate()

        def work() -> None:
            gate.open.wait(TIMEOUT)
            burn(0.06)

        jobs = [pool.submit("greedy", work), pool.submit("greedy", gate.work("late", wait=False))]
        gate.open.set()  # both were accepted before any CPU time was used
        jobs[0].result(TIMEOUT)
        with pytest.raises(TooManyPending, match=r"used 0\.[01] s of CPU time recently; 0\.05 s are allowed"):
            jobs[1].result(TIMEOUT)
        with pytest.raises(TooManyPending, match="CPU time") as refused:
            pool.submit("greedy", int)
        assert 1 <= refused.value.retry_after <= 60
        assert not gate.ran
        assert pool.num_pending == 0
        # A sleeping job uses no CPU time.
        for _ in range(2):
            pool.submit("neighbour", lambda: time.sleep(0.06)).result(TIMEOUT)
        assert pool.submit("neighbour", lambda: 1).result(TIMEOUT) == 1
        clock[0] += refused.value.retry_after
        assert pool.submit("greedy", lambda: 2).result(TIMEOUT) == 2
    finally:
        pool.close()


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the system start no thread for this method, as at a container's limit of processes."""
    start = fair_threads.start_new_thread

    def starts(run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if run.__name__ == name:
            raise RuntimeError("can't start new thread")
        start(run, arguments)

    monkeypatch.setattr(fair_threads, "start_new_thread", starts)


def test_a_job_that_gets_no_thread_fails_and_its_place_is_free_again(threads, monkeypatch):
    with monkeypatch.context() as patch:
        refuse_threads(patch, "_run")
        for _ in range(4):
            with pytest.raises(OSError, match="no further thread"):
                threads.submit("a", int).result(TIMEOUT)
    assert threads.submit("a", lambda: 1).result(TIMEOUT) == 1
    assert threads.num_pending == 0


def test_jobs_run_where_the_watcher_gets_no_thread(monkeypatch):
    refuse_threads(monkeypatch, "_watch")
    eager = Yielding(after_seconds=0.0, rest=1.0)
    pool = FairThreads(2, "test", max_pending=50, max_pending_per_tenant=50, yielding=eager)
    try:
        for _ in range(4):
            pool.submit("a", lambda: burn(0.01)).result(TIMEOUT)
        until(lambda: not pool._running)
    finally:
        pool.close()


def test_submitting_a_job_does_not_wait_until_its_thread_runs(threads, monkeypatch):
    """The start of a thread waits for a core, and an event loop must not."""
    late, start = [], fair_threads.start_new_thread
    with monkeypatch.context() as patch:
        patch.setattr(fair_threads, "start_new_thread", lambda run, arguments: late.append((run, arguments)))
        job = threads.submit("a", lambda: 1)
        assert not job.done()
    for run, arguments in late:
        start(run, arguments)
    assert job.result(TIMEOUT) == 1


def test_a_shared_job_runs_once_at_whichever_turn_is_first(threads):
    gate = Gate()
    for _ in range(2):
        threads.submit("greedy", gate.work("greedy"))
    shared = threads.submit("greedy", gate.work("shared", wait=False))
    threads.share("neighbour", shared)
    assert shared.result(TIMEOUT) == "shared"
    gate.open.set()
    assert threads.num_pending == 0
    assert gate.ran.count("shared") == 1


class Panic(BaseException):
    """A BaseException, like pyo3's PanicException."""


def test_a_panic_reaches_the_caller_and_ends_no_thread_for_good(threads):
    def panic() -> None:
        raise Panic

    for _ in range(5):
        with pytest.raises(Panic):
            threads.submit("a", panic).result(TIMEOUT)
    assert threads.submit("a", lambda: 1).result(TIMEOUT) == 1


@ON_LINUX
@WITH_NORMAL_PRIORITY
def test_a_tenant_of_much_recent_use_runs_at_low_priority(clock):
    yielding = Yielding(after_seconds=0.01, nice=12)
    threads = FairThreads(3, "test", max_pending=9, max_pending_per_tenant=9, yielding=yielding)

    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    normal = nice()
    assert threads.submit("greedy", nice).result(TIMEOUT) == normal

    def work() -> None:
        clock[0] += 0.05

    threads.submit("greedy", work).result(TIMEOUT)
    until(lambda: threads.is_heavy("greedy"))
    assert threads.submit("greedy", nice).result(TIMEOUT) == yielding.nice
    assert threads.submit("neighbour", nice).result(TIMEOUT) == normal
    threads.close()


@ON_LINUX
@WITH_NORMAL_PRIORITY
def test_a_job_that_waited_for_a_job_of_low_priority_has_normal_priority(clock):
    pool = FairThreads(1, "test", max_pending=9, max_pending_per_tenant=9, yielding=Yielding(after_seconds=0.01))
    gate = Gate()

    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def work() -> None:
        clock[0] += 0.05

    try:
        pool.submit("greedy", work).result(TIMEOUT)
        until(lambda: pool.is_heavy("greedy"))
        lowered = [pool.submit("greedy", lambda: gate.open.wait(TIMEOUT) and nice()) for _ in range(3)]
        waiting = pool.submit("neighbour", nice)
        gate.open.set()
        assert waiting.result(TIMEOUT) == nice()
        assert [job.result(TIMEOUT) for job in lowered] == [Yielding().nice] * 3
    finally:
        pool.close()


def test_a_heavy_tenants_jobs_take_a_part_of_a_core_and_others_do_not_wait(clock):
    """A heavy tenant's next job starts four times its last job's CPU time later."""
    yielding = Yielding(after_seconds=0.01, rest=4.0)
    pool = FairThreads(2, "test", max_pending=50, max_pending_per_tenant=50, yielding=yielding)

    def work() -> None:
        burn(0.02)
        clock[0] += 0.02

    try:
        jobs = [pool.submit("greedy", work) for _ in range(4)]
        for number, job in enumerate(jobs):
            job.result(TIMEOUT)
            until(lambda: "greedy" in pool._rests)
            for _ in range(5):
                pool.submit("neighbour", int).result(TIMEOUT)
            assert [each.done() for each in jobs].count(True) == number + 1
            rest = pool._rests["greedy"] - clock[0]
            assert 4 * 0.02 <= rest <= fair_threads.MAX_REST_SECONDS
            until(lambda: not pool._running)  # otherwise the neighbour is charged for the time that passes
            clock[0] += rest
        until(lambda: not pool._rests)
        # Work of no tenant never rests.
        for _ in range(3):
            pool.submit("", work).result(TIMEOUT)
        assert not pool._rests
    finally:
        pool.close()


def test_a_tenants_jobs_rest_when_told_to_and_others_do_not_wait(clock):
    pool = FairThreads(2, "test", max_pending=50, max_pending_per_tenant=50, yielding=None)
    try:
        pool.rest("greedy", 0.5)
        pool.rest("greedy", 0.5)
        jobs = [pool.submit("greedy", int) for _ in range(3)]
        clock[0] += 0.9
        assert pool.submit("neighbour", int).result(TIMEOUT) == 0
        assert not any(job.done() for job in jobs)
        clock[0] += 0.2
        assert [job.result(TIMEOUT) for job in jobs] == [0, 0, 0]
        pool.rest("greedy", 100.0)
        assert pool._rests["greedy"] <= clock[0] + fair_threads.MAX_REST_SECONDS
    finally:
        pool.close()


@ON_LINUX
@WITH_NORMAL_PRIORITY
def test_a_first_job_that_runs_long_goes_on_at_low_priority(threads, clock, monkeypatch):
    monkeypatch.setattr(fair_threads, "LONG_SECONDS", 0.05)

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())  # which a new thread has too

    def slowed() -> int:
        clock[0] += 0.05
        deadline = time.monotonic() + TIMEOUT
        while (now := os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == before:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return now

    after = threads.submit("light", slowed).result(TIMEOUT)
    assert after == Yielding().nice > before
    monkeypatch.setattr(fair_threads, "LONG_SECONDS", 3600.0)
    now = threads.submit("light", lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(TIMEOUT)
    assert now == before


def test_closing_cancels_what_waits():
    pool, gate = FairThreads(2, "test", max_pending=5, max_pending_per_tenant=5), Gate()
    running = pool.submit("a", gate.work("a"))
    waiting = pool.submit("a", gate.work("a"))
    gate.open.set()
    pool.close()
    assert running.result(0) == "a"
    assert waiting.cancelled() or waiting.result(0) == "a"
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("a", int)
