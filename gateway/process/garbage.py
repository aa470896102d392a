"""Garbage collections at times when few requests run.

A full collection visits every object that was made since the start, 1 µs each: 40 ms while 500 requests wait. Requests
leave almost no cycles (200 objects a second in a flood), so full collections can wait for a calm time. Python's own
rule, by which a full collection waits until a quarter of the objects are new, does not hold for `gc.collect`.
"""

import asyncio
import gc
import time
from collections.abc import Callable

# Thresholds of Python's own collections. Python counts new objects minus freed ones. At its default of 700, every fifth
# request causes a collection, which takes 7 % of a busy gateway's time. Every second collection is of the middle
# generation: 7,000 objects, 3 ms. A full one comes after 41 of those, so garbage is bounded while the process is busy.
THRESHOLDS = 3500, 0, 40
LOOK_SECONDS = 0.5
# Most running requests at a calm time, each with 65 objects, and the collections of the middle generation after which
# a full one is due.
CALM_REQUESTS, DUE_AFTER = 100, 4
# Busy time after which a due collection runs anyway: long streams count as running requests, and so do
# requests that wait for their turn.
BUSY_SECONDS = 60.0
# Pause after each collection, in durations of the collection. A full one takes 8 ms, so a pause of 8 s lets it delay
# one of 250 requests that take 25 ms. With a pause of 50 durations it could delay one of 12.
PAUSE_DURATIONS = 1000
# Age of the process at which all present objects (caches, late imports) are excluded from collections for the first
# time. Each further time is at twice the age of the last one, because excluded objects are never collected.
WARM_SECONDS = 20.0


def reduce_pauses() -> None:
    """Exclude all present objects from future collections, and set the thresholds."""
    _freeze()
    gc.set_threshold(*THRESHOLDS)


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    # The second collection is of an empty heap: Python waits until a quarter of the objects of the last one are new.
    gc.collect()


async def collect_when_calm(num_running: Callable[[], int]) -> None:
    """Collect garbage until cancelled. num_running: returns the number of running requests. Run it as a task."""
    started = last = time.monotonic()
    warm = WARM_SECONDS
    while True:
        # last: when the process was last calm, or the end of the last pause.
        await asyncio.sleep(LOOK_SECONDS)
        now = time.monotonic()
        if num_running() > CALM_REQUESTS and now - last < BUSY_SECONDS:
            continue
        last = now
        if now - started > warm:
            _freeze()
            warm = 2 * (time.monotonic() - started)
        elif gc.get_count()[2] >= DUE_AFTER:
            gc.collect()
        else:
            continue
        await asyncio.sleep(PAUSE_DURATIONS * (time.monotonic() - now))
        last = time.monotonic()
