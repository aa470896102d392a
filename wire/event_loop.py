"""The event loop of both programs' servers."""

import asyncio
import sys
from collections.abc import Callable

# Interval after which a Python thread releases the interpreter lock to a waiting one; Python's default is 5 ms.
SWITCH_SECONDS = 0.0001


def shorten_lock_waits() -> None:
    """Let threads that work on large answers or bodies return the interpreter lock sooner.

    An event loop takes the lock anew for each callback, and the engine's step thread several times a step.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory if it is installed (the extra `fast`); a request then costs a third less."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
