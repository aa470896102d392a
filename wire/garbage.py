"""Garbage collections at a program's start and end, which visit the objects of all modules and free almost none."""

import atexit
import gc

# New objects until a collection while a program starts. An import of the gateway makes 300,000; the default is 700.
SELDOM = 100_000
_usual = gc.get_threshold()


def collect_seldom() -> None:
    """Collect seldom from now on, and not at the program's exit.

    This saves a quarter of a command's CPU time, and a tenth of a gateway's start. Gateways and engines set their own
    thresholds once they have started; other commands keep this one.
    """
    gc.set_threshold(SELDOM)
    # Python collects several times at its exit, and then visits no frozen object.
    atexit.register(gc.freeze)


def collect_as_usual() -> None:
    """Exclude all present objects from collections, and collect as often as Python does by default."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_usual)
