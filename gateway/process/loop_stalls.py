"""Explanation of a stall of the event loop: where the time went, and the stack of the loop's thread during it.

A watchdog thread looks at a beat that the loop writes (the time at which its next tick is due), and samples the stack
while that is overdue. Samples have names of functions, files and lines, never values: locals may hold prompts and keys.
"""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from gateway.log_format import FIELDS
from gateway.process.gil_priority import lower_gil_priority
from gateway.process.thread_times import Counts, close_task, open_task, read_task, stolen_seconds

log = logging.getLogger(__name__)

# A stall longer than this is explained; it is the limit of `benchmarks.hostile` too.
EXPLAINED_SECONDS = 0.1
# Pause of the watchdog, and the delay of a tick from which it samples: each stall of EXPLAINED_SECONDS has a sample,
# unless the watchdog was held too.
PAUSE_SECONDS, SAMPLED_SECONDS = 0.07, 0.025
# Maximum samples of one stall, and frames of a sample, the innermost first.
MAX_SAMPLES, MAX_FRAMES = 100, 12
# Minimum time between two log lines, so that a tenant that stalls the loop again and again does not fill the log.
LOG_SECONDS = 10.0
# Time between two readings of the machine's stolen time.
STOLEN_SECONDS = 1.0
# Start of the log's line.
EVENT = "gateway.loop_stalled"

Stack = tuple[tuple[CodeType, int | None], ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall in parts, in seconds. computing + waiting + blocked = held.

    blocked: the thread slept in the kernel: disk, interpreter lock, page fault; or a hypervisor had taken its CPU.
    others: CPU time of the process's other threads. stolen: time that the hypervisor took from all CPUs during the
    stall and up to a second before it. late: delay of the watchdog during the stall; if it is as long, the whole
    process stood still or a thread kept the interpreter lock. minor, major: page faults of the loop's thread. samples:
    their number; stack: the most frequent one, "" without a sample. kernel: the kernel's function in which the thread
    slept, "" if it did not or the kernel does not say.
    """

    held: float
    computing: float
    waiting: float
    blocked: float
    others: float
    stolen: float
    late: float
    minor: int
    major: int
    samples: int
    kernel: str
    stack: str

    @property
    def causes(self) -> dict[str, float]:
        return {"computing": self.computing, "waiting_for_cpu": self.waiting, "blocked": self.blocked}

    @property
    def fields(self) -> dict[str, Any]:
        """Return the parts of the log's line."""
        causes = self.causes
        return {
            "held_ms": _ms(self.held),
            "cause": max(causes, key=lambda cause: causes[cause]),
            **{f"{cause}_ms": _ms(seconds) for cause, seconds in causes.items()},
            "other_threads_ms": _ms(self.others),
            "stolen_ms": _ms(self.stolen),
            "watchdog_late_ms": _ms(self.late),
            "minor_faults": self.minor,
            "major_faults": self.major,
            "kernel": self.kernel or "-",
            "samples": self.samples,
            "stack": self.stack or "-",
        }


class Watchdog:
    """Thread that samples the stack of the thread that makes this object.

    due: returns the time at which the loop's next tick is due, None before the first one.
    """

    def __init__(self, due: Callable[[], float | None]) -> None:
        self._due = due
        self._loops_thread = threading.get_ident()
        self._kernel = open_task(threading.get_native_id(), "wchan")
        # Samples of the tick that was due at `_sampled`: the kernel's function and the stack.
        self._sampled: float | None = None
        self._samples: list[tuple[str, Stack]] = []
        self._wakes_at = time.monotonic() + PAUSE_SECONDS
        # End and length of the newest delay of the watchdog itself.
        self._late = (0.0, 0.0)
        # Stolen time at most STOLEN_SECONDS before the newest stall, and when it was read; then at its newest sample.
        self._stolen, self._stolen_at = stolen_seconds(), time.monotonic()
        self._stolen_at_sample = self._stolen
        self._ended = False
        # A daemon, and never joined: its end must not hold the loop.
        threading.Thread(target=self._run, name="loop watchdog", daemon=True).start()

    def end(self) -> None:
        self._ended = True

    def explain(self, due: float, before: Counts, after: Counts) -> Stall:
        """Explain the loop's newest stall. Call it in the loop's thread, before the next tick is due.

        due: the time at which the late tick was due. before: counts at the tick's start. The time before `due` is in
        them too, so computing and waiting are upper bounds: too high by at most the length of a tick.
        """
        held = after.at - due
        samples = list(self._samples) if self._sampled == due else []
        stacks = Counter(stack for _, stack in samples)
        slept = Counter(name for name, _ in samples if name)
        computing = min(held, after.computed - before.computed)
        waiting = min(held - computing, after.waited - before.waited)
        ended, late = self._late
        return Stall(
            held=held,
            computing=computing,
            waiting=waiting,
            blocked=held - computing - waiting,
            others=max(0.0, after.process - before.process - (after.computed - before.computed)),
            stolen=self._stolen_at_sample - self._stolen if samples else 0.0,
            late=max(0.0, after.at - self._wakes_at, late if ended > due else 0.0),
            minor=after.minor - before.minor,
            major=after.major - before.major,
            samples=len(samples),
            kernel=slept.most_common(1)[0][0] if slept else "",
            stack=_text(stacks.most_common(1)[0][0]) if stacks else "",
        )

    def _run(self) -> None:
        lower_gil_priority()
        while not self._ended:
            self._wakes_at = time.monotonic() + PAUSE_SECONDS
            time.sleep(PAUSE_SECONDS)
            now = time.monotonic()
            if now - self._wakes_at > PAUSE_SECONDS:
                self._late = (now, now - self._wakes_at)
            due = self._due()
            if due is not None and now - due > SAMPLED_SECONDS:
                self._sample(due)
            elif now - self._stolen_at > STOLEN_SECONDS:
                self._stolen, self._stolen_at = stolen_seconds(), now
        close_task(self._kernel)

    def _sample(self, due: float) -> None:
        if due != self._sampled:
            self._samples, self._sampled = [], due
        if len(self._samples) >= MAX_SAMPLES:
            return
        # Read first: while this thread has the interpreter lock, the loop's thread may wait for it.
        kernel = read_task(self._kernel).strip("\0 \n")
        frame = sys._current_frames().get(self._loops_thread)
        stack: list[tuple[CodeType, int | None]] = []
        while frame is not None and len(stack) < MAX_FRAMES:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        # "0" is a running thread.
        self._samples.append(("" if kernel == "0" else kernel, tuple(stack)))
        # Read here and not by `explain`: the kernel's file takes long on a machine with many CPUs.
        self._stolen_at_sample = stolen_seconds()


class StallLog:
    """Log lines of stalls, and their seconds by cause. count: adds to a cause.

    At most one line in LOG_SECONDS, except for a stall that is twice as long as the last one logged: a short stall just
    before it does not hide it.
    """

    def __init__(self, count: Callable[[str, float], None]) -> None:
        self._count = count
        self._logged_at = -LOG_SECONDS
        self._logged_held = 0.0
        self._left_out = 0

    def report(self, stall: Stall) -> None:
        for cause, seconds in stall.causes.items():
            self._count(cause, seconds)
        now = time.monotonic()
        if now - self._logged_at < LOG_SECONDS and stall.held < 2 * self._logged_held:
            self._left_out += 1
            return
        # The stack has spaces, so it is the last part.
        parts = {"left_out": self._left_out, **stall.fields}
        text = " ".join(f"{name}={value}" for name, value in parts.items())
        log.warning("%s %s", EVENT, text, extra={FIELDS: {"event": EVENT, **parts}})
        self._logged_at, self._logged_held, self._left_out = now, stall.held, 0


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _text(stack: Stack) -> str:
    return " < ".join(f"{code.co_qualname} ({_short(code.co_filename)}:{line})" for code, line in stack)


def _short(path: str) -> str:
    """Return the path of a source file relative to the longest import path that it lies in."""
    folders = [folder for folder in sys.path if folder and path.startswith(f"{folder}/")]
    return path[len(max(folders, key=len)) + 1 :] if folders else path
