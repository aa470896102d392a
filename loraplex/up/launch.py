"""Launcher of a program that ends with its parent: `... -m loraplex.up.launch PARENT_PID CPUS PROGRAM [ARGUMENT...]`.

CPUS are those that the program may use, such as `0,1`; an empty string allows all.

The launcher asks the kernel for SIGTERM on the parent's death (Linux `PR_SET_PDEATHSIG`, which survives `execv`); then
the program replaces this process. So even a SIGKILL of the parent leaves no process behind. Other systems lack this
call: there the program starts nevertheless, and only an orderly stop of the parent ends it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cpus, program = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # If the parent died before the call above, no signal would come.
    if os.getppid() != parent:
        sys.exit(0)
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
