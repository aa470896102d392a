"""Division of a thread's time: computing, waiting for a CPU, or neither, from the kernel's counters."""

import os
import resource
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

# Only Linux has both. Elsewhere no wait for a CPU is known, and page faults count as 0.
TASK = "/proc/self/task/{}/{}"
RUSAGE_THREAD = getattr(resource, "RUSAGE_THREAD", None)
STAT = "/proc/stat"


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of a thread at one time, in seconds.

    at: `time.monotonic`. computed: its CPU time. waited: its time on a run queue, ready but without a CPU. process: CPU
    time of all threads. minor, major: its page faults; a major one reads a disk.
    """

    at: float
    computed: float
    waited: float
    process: float
    minor: int
    major: int


class ThreadTimes:
    """Counters of the thread that makes this object; only that thread may call `read`."""

    def __init__(self) -> None:
        self._waits = open_task(threading.get_native_id(), "schedstat")

    def read(self) -> Counts:
        """Return the counters. Takes 3 µs."""
        minor, major = 0, 0
        if RUSAGE_THREAD is not None:
            used = resource.getrusage(RUSAGE_THREAD)
            minor, major = used.ru_minflt, used.ru_majflt
        # CPU time, time on a run queue (both in nanoseconds), number of slices.
        fields = read_task(self._waits).split()
        waited = int(fields[1]) / 1e9 if len(fields) == 3 else 0.0
        return Counts(time.monotonic(), time.thread_time(), waited, time.process_time(), minor, major)

    def close(self) -> None:
        close_task(self._waits)


def open_task(thread: int, name: str) -> int | None:
    """Return a descriptor of the kernel's file about a thread, None if the system has no such file."""
    try:
        return os.open(TASK.format(thread, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def read_task(descriptor: int | None) -> str:
    """Return the text of a file from `open_task`, "" without one or if its thread has ended."""
    if descriptor is not None:
        with suppress(OSError):
            return os.pread(descriptor, 128, 0).decode()
    return ""


def close_task(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def stolen_seconds() -> float:
    """Return the seconds that the hypervisor has taken from all CPUs, in steps of 10 ms; 0 if it is not known."""
    try:
        with open(STAT, "rb", buffering=0) as file:
            fields = file.read(256).split(b"\n")[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0
