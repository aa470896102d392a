"""Programmatic dependent launch (compute capability 9.0): a kernel is launched before the kernel ahead of it has ended.

A kernel with `EARLY` waits (`gdc_wait`) before it reads what earlier kernels of its step write, and before it writes
anything. It calls `gdc_launch_dependents` only after its own wait, when all kernels ahead of it have ended. So the next
kernel may read, before its own wait, whatever this kernel does not write. A kernel without `EARLY` still runs after all
earlier work of its stream, because every kernel with `EARLY` waits.

Only neighbours in a single stream launch early: CUDA does not document how a capture treats an early launch behind the
join of two streams. Not measured yet, because no GPU was at hand (docs/lab-notes.md).
"""

from functools import cache
from typing import Any

import torch


@cache
def can_launch_early(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch; not in Triton's interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(early: bool) -> dict[str, Any]:
    """Return the options of an early launch, which Triton's interpreter does not know."""
    return {"launch_pdl": True} if early else {}
