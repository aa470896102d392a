"""Large tables that use memory only where they have been written."""

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, *, huge_pages: bool = False) -> Tensor:
    """Return zeros in host memory. The system allocates pages at first access; torch.zeros would touch all of them.

    huge_pages: allocate 2 MiB at a time, for tables that are read sequentially.
    """
    count = math.prod(shape)
    if huge_pages:
        return torch.frombuffer(_huge_pages(count * dtype.itemsize), dtype=dtype, count=count).view(*shape)
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype).view(*shape)


class HugePages:
    """Uninitialised memory on huge pages, if the system has them, for tensors with the same lifetime.

    A pass over hundreds of MiB on pages of 4 KiB is bound by address translation: 33 GB/s against 58 GB/s measured. A
    chunk is freed with its last tensor.
    """

    _CHUNK = 64 << 20
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        size = -(-num_elements * dtype.itemsize // self._ALIGNMENT) * self._ALIGNMENT
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = _huge_pages(max(size, self._CHUNK)), 0
        at, self._used = self._used, self._used + size
        return torch.frombuffer(self._chunk, dtype=dtype, count=num_elements, offset=at)


def _huge_pages(size: int) -> mmap.mmap:
    # MAP_PRIVATE, because the system backs shared memory with huge pages only if an administrator allows it.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
