"""Progress of an engine's start, in phases."""

from collections.abc import Callable

StartProgress = Callable[[str, int, int], None]
"""Called with the phase, how much of it is done, and how much there is: bytes while loading, else steps."""

LOADING, CAPTURING, WARMING = "loading weights", "capturing CUDA graphs", "warming up"


def describe(phase: str, done: int, total: int) -> str:
    """Return a phase's progress, such as `warming up: 12 of 40`."""
    if phase == LOADING:
        return f"{phase}: {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    return f"{phase}: {done} of {total}"
