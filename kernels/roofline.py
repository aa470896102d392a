"""Measured roofline of a device: its memory bandwidth and its rate of matrix products.

Williams, Waterman, Patterson 2009, "Roofline": work takes at least as long as its bytes or its operations need.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.platform import DeviceEvent, platform_of

MAX_READ_BYTES = 128 << 20
# Products grow until one takes this long, so that a slow device is measured as quickly as a fast one.
LONG_ENOUGH_S, FIRST_SIZE, LAST_SIZE = 0.005, 256, 8192
# The first run of each measurement allocates or compiles. On a busy machine the others end early.
RUNS, MAX_S = 4, 0.06


class Roofline(NamedTuple):
    """Limits of a device, per second. bandwidth: bytes read. flops: operations of matrix products."""

    bandwidth: float
    flops: float

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """Return the least time for this work."""
        return max(num_bytes / self.bandwidth, num_flops / self.flops)


@torch.inference_mode()
def measure_roofline(device: torch.device, dtype: torch.dtype, weight_bytes: int) -> Roofline:
    """Measure a device, in 0.1 to 0.5 s. Other work on it at that time makes it look slower.

    weight_bytes: the bandwidth is that of a buffer of this size, at most MAX_READ_BYTES, so that a cache that holds
    the whole model counts.
    """
    platform = platform_of(device)
    num_read = min(max(weight_bytes, 1 << 20), MAX_READ_BYTES) // 4 * 4
    # Huge pages, as weights and keys have: on pages of 4 KiB a read is bound by address translation. Zeros would share
    # one page.
    buffer = platform.zeros((num_read // 4,), torch.float32, huge_pages=True).fill_(1)
    bandwidth = num_read / _least_time(buffer.sum, platform.record_event)
    del buffer
    # A CPU without products of 16 bits computes them in fp32.
    dtypes = {dtype, torch.float32} if platform.is_host else {dtype}
    return Roofline(bandwidth, max(_flops(device, each, platform.record_event) for each in dtypes))


def _flops(device: torch.device, dtype: torch.dtype, record_event: Callable[[], DeviceEvent]) -> float:
    best, size = 0.0, FIRST_SIZE
    while True:
        factor = torch.ones(size, size, dtype=dtype, device=device)
        seconds = _least_time(lambda factor=factor: factor @ factor, record_event)  # type: ignore[misc]
        best = max(best, 2 * size**3 / seconds)
        if seconds >= LONG_ENOUGH_S or size >= LAST_SIZE:
            return best
        size *= 2


def _least_time(run: Callable[[], object], record_event: Callable[[], DeviceEvent]) -> float:
    least, end = math.inf, time.perf_counter() + MAX_S
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        record_event().synchronize()
        least = min(least, time.perf_counter() - began)
        if time.perf_counter() > end:
            break
    return least
