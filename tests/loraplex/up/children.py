"""A child process for tests, and questions about children."""

import sys

# It outlives every deadline here, so that no test takes its own end for the end that is tested.
SLEEPER = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


def alive(pid: int) -> bool:
    """Return whether the process is running; a zombie is not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between `open` and `read`
        return False


async def is_back(child, before: int) -> bool:
    return child.process.pid != before and child.healthy_at is not None


async def has_printed(child) -> bool:
    return bool(child.log.read_text())
