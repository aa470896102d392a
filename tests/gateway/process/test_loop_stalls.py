"""A stall of the event loop is explained: where its time went, and in which function."""

import asyncio
import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from gateway.log_format import FIELDS
from gateway.process import loop_stalls
from gateway.process.background import running
from gateway.process.loop_lag import LoopLag
from gateway.process.loop_stalls import EVENT, EXPLAINED_SECONDS, Stall, StallLog
from testing.gateway.running import Gateway, until

SECRET = "my secret prompt"
SECONDS = 0.3
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a wait for a CPU")


def compute_for_long(prompt: str) -> int:
    """Compute for SECONDS of CPU time."""
    end, rounds = time.thread_time() + SECONDS, 0
    while time.thread_time() < end:
        rounds += len(prompt)
    return rounds


def sleep_for_long(prompt: str) -> None:
    assert prompt
    time.sleep(SECONDS)


def wait_for_lock(_: str) -> None:
    """Start a thread that keeps the interpreter lock while it sleeps, and ask for the lock."""
    usleep = ctypes.PyDLL(None).usleep
    thread = threading.Thread(target=usleep, args=(int(SECONDS * 1e6),))
    thread.start()
    thread.join()


async def stalled(hold: Callable[[str], object], as_expected: Callable[[Stall], bool]) -> Stall:
    """Hold a loop again and again until a stall is as expected: a busy machine adds others. Return it."""
    stalls: list[Stall] = []

    async def is_found() -> bool:
        hold(SECRET)
        await asyncio.sleep(0.1)
        return any(map(as_expected, stalls))

    lag = LoopLag(stalls.append)
    lag.explain_from_now()
    async with running(lag.watch()):
        await asyncio.sleep(0.1)
        await until(is_found)
    return next(stall for stall in stalls if as_expected(stall))


def cause(stall: Stall) -> str:
    return stall.fields["cause"]


async def test_a_computation_is_named():
    stall = await stalled(compute_for_long, lambda stall: stall.computing > SECONDS - 0.05 and stall.samples > 1)
    # On a busy machine it waits for a CPU for longer than it computes.
    assert stall.blocked < stall.computing
    assert cause(stall) == ("computing" if stall.waiting < stall.computing else "waiting_for_cpu")
    assert stall.computing + stall.waiting + stall.blocked == pytest.approx(stall.held)
    assert stall.stack.startswith("compute_for_long (tests/gateway/process/test_loop_stalls.py:")
    assert "stalled.<locals>.is_found (" in stall.stack
    assert SECRET not in str(stall)


async def test_a_sleep_in_the_kernel_is_named():
    stall = await stalled(sleep_for_long, lambda stall: stall.blocked > SECONDS / 2 and stall.samples > 1)
    assert cause(stall) == "blocked"
    assert stall.computing < stall.blocked
    assert stall.stack.startswith("sleep_for_long (")
    # Some containers hide the kernel's function.
    assert not stall.kernel or "sleep" in stall.kernel


async def test_a_wait_for_the_interpreter_lock_holds_the_watchdog_too():
    stall = await stalled(wait_for_lock, lambda stall: stall.blocked > SECONDS / 2)
    assert cause(stall) == "blocked"
    assert stall.late > SECONDS / 2


@LINUX
@pytest.mark.usefixtures("takes_a_core")
def test_a_wait_for_a_cpu_is_named():
    """The loop's thread gives way to a busy process on its only core."""
    core = min(os.sched_getaffinity(0))
    stalls: list[Stall] = []

    def start_busy() -> subprocess.Popen[bytes]:
        script = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
        return subprocess.Popen([sys.executable, "-c", script])

    async def watch() -> None:
        lag = LoopLag(stalls.append)
        lag.explain_from_now()
        async with running(lag.watch()):
            # Only now: beside the busy process, the loop's own start and end would take seconds.
            process = start_busy()
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            deadline = time.monotonic() + 60
            try:
                while time.monotonic() < deadline and not any(cause(each) == "waiting_for_cpu" for each in stalls):
                    # Something to compute, for which it needs a CPU.
                    sum(range(100_000))
                    await asyncio.sleep(0.001)
            finally:
                process.kill()
                process.wait()

    def starve() -> None:
        os.sched_setaffinity(0, {core})
        asyncio.run(watch())

    # The priority is that of a thread of its own, which no other inherits.
    thread = threading.Thread(target=starve)
    thread.start()
    thread.join()
    assert [each for each in stalls if each.waiting > each.held / 2], stalls


async def test_nothing_is_explained_while_the_loop_runs():
    stalls: list[Stall] = []
    lag = LoopLag(stalls.append)
    lag.explain_from_now()

    async def runs_well() -> bool:
        """Return whether a second had no stall. A busy machine may need several attempts."""
        stalls.clear()
        start = time.monotonic()
        await asyncio.sleep(1)
        return lag.since(start) < EXPLAINED_SECONDS and not stalls

    async with running(lag.watch()):
        await until(runs_well)


async def test_no_stall_of_the_start_is_explained():
    began = list[float]()
    lag = LoopLag(lambda stall: began.append(time.monotonic() - stall.held))
    async with running(lag.watch()):
        await asyncio.sleep(0.1)
        sleep_for_long(SECRET)
        # The stall began before.
        explained_from = time.monotonic()
        lag.explain_from_now()
        await asyncio.sleep(0.1)
        assert lag.longest > SECONDS / 2
        # A busy machine may add stalls, which began later.
        assert all(moment > explained_from for moment in began)


def a_stall() -> Stall:
    return Stall(0.5, 0.1, 0.3, 0.1, 0.0, 0.25, 0.0, 7, 1, 0, "", "")


def test_the_log_has_one_line_in_ten_seconds_and_the_number_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    counted: list[tuple[str, float]] = []
    stall_log = StallLog(lambda cause, seconds: counted.append((cause, seconds)))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            stall_log.report(a_stall())
        monkeypatch.setattr(loop_stalls, "LOG_SECONDS", 0.0)
        stall_log.report(a_stall())
        stall_log.report(a_stall())
    first, second, third = caplog.records
    assert first.getMessage() == (
        f"{EVENT} left_out=0 held_ms=500 cause=waiting_for_cpu computing_ms=100 waiting_for_cpu_ms=300 blocked_ms=100 "
        "other_threads_ms=0 stolen_ms=250 watchdog_late_ms=0 minor_faults=7 major_faults=1 kernel=- samples=0 stack=-"
    )
    fields = getattr(second, FIELDS)
    assert (fields["event"], fields["left_out"], fields["held_ms"]) == ("gateway.loop_stalled", 2, 500)
    assert getattr(third, FIELDS)["left_out"] == 0
    # The metric counts those too that the log leaves out.
    assert counted == [("computing", 0.1), ("waiting_for_cpu", 0.3), ("blocked", 0.1)] * 5


def test_a_short_stall_does_not_hide_a_long_one(caplog: pytest.LogCaptureFixture):
    stall_log = StallLog(lambda cause, seconds: None)
    with caplog.at_level(logging.WARNING):
        for held in (0.5, 0.9, 1.0, 1.9, 2.0):
            stall_log.report(replace(a_stall(), held=held))
    fields = [getattr(record, FIELDS) for record in caplog.records]
    assert [(each["held_ms"], each["left_out"]) for each in fields] == [(500, 0), (1000, 1), (2000, 1)]


async def test_a_gateway_logs_a_stall_and_counts_it(gateway: Gateway, caplog: pytest.LogCaptureFixture):
    # The gateway runs on this test's loop.
    async def counted() -> bool:
        sleep_for_long(SECRET)
        await asyncio.sleep(0.1)
        page = (await gateway.admin.get("/metrics")).body.decode()
        start = 'loraplex_gateway_loop_stalled_seconds_total{cause="blocked"} '
        return any(float(line.split()[1]) > 0.2 for line in page.splitlines() if line.startswith(start))

    with caplog.at_level(logging.WARNING):
        await until(counted)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith(EVENT)]
    assert lines
    assert not [line for line in lines if SECRET in line]
