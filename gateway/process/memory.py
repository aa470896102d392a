"""Settings of glibc's allocator, so that memory of freed buffers returns to the system."""

import ctypes
import sys

# glibc's options: the size from which a buffer gets its own pages, and the limit of the heaps (arenas).
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
LARGE_BUFFER_BYTES, NUM_HEAPS = 2**18, 1


def return_freed_memory() -> None:
    """Make glibc return large buffers to the system when they are freed, and keep all others in one heap.

    By default glibc raises its threshold for large buffers to the largest one that was freed, and gives threads heaps
    of their own, up to eight a core. Request bodies, which several threads handle, then fragment each of these heaps.
    A common heap costs little speed, because the interpreter lock lets one thread run at a time.

    Call it before the first thread starts. Without effect on systems without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform == "linux" and mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BUFFER_BYTES)
        mallopt(M_ARENA_MAX, NUM_HEAPS)
