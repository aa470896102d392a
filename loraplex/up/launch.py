"""Runs a program that ends when its parent does: `python -m loraplex.up.launch PARENT_PID PROGRAM [ARGUMENT...]`.

The kernel is asked to send SIGTERM on the parent's death (Linux `PR_SET_PDEATHSIG`, which survives `execv`), then the
program takes this process over. So even a SIGKILL of the parent leaves nothing behind. Other systems have no such call:
there the program starts all the same, and only an orderly stop of the parent ends it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # The parent may have died before the call above; nobody would signal us then.
    if os.getppid() != parent:
        sys.exit(0)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
