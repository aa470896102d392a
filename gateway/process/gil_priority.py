"""Low priority of a thread for the interpreter lock (GIL), below the event loop's.

A thread that waits for the lock asks its holder to release it after the switch interval of 0.1 ms (wire/event_loop.py),
so a busy thread takes the lock from the loop again and again, and each wait of the loop takes 0.2 ms more: 0.8 ms of
its work took 2.4 to 2.5. Python has no priorities here, but Linux ends a timed wait up to the thread's timer slack
later, by default 0.05 ms. A thread with a larger slack asks later, and gets the lock when the loop waits for events:
0.8 ms of the loop's work take 1.4 to 1.5. A thread without pauses computes as much as before; a count of a body of
8 MiB, which pauses, takes 97 ms instead of 54.
"""

import ctypes
import sys

# Option of Linux's `prctl`, and the slack in nanoseconds. While the loop never waits for events, such a thread has the
# lock for about a tenth of the time.
PR_SET_TIMERSLACK, SLACK_NS = 29, 1_000_000
# A call that keeps the lock.
_prctl = ctypes.PyDLL(None).prctl if sys.platform == "linux" else None


def lower_gil_priority() -> None:
    """Make this thread ask late for the interpreter lock. Its other timed waits end up to SLACK_NS later too."""
    if _prctl is not None:
        _prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
