"""Copies between host and device without waiting: one copy each way for all data of a step.

On a GPU copies use pinned memory of torch's caching allocator, which reuses a buffer only after its copy is done.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kernels.platform import DeviceEvent, Platform, platform_of

_ALIGNMENT = 16


def upload(device: torch.device, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Return the arrays on the device, in order. On the CPU the tensors share the arrays' memory."""
    platform = platform_of(device)
    if platform.is_host:
        return [torch.from_numpy(array) for array in arrays]
    if len(arrays) == 1:  # usual, and quicker without a view
        [array] = arrays
        buffer = platform.staging(array.shape, _torch_dtype(array.dtype))
        buffer.numpy()[...] = array
        return [buffer.to(device, non_blocking=True)]
    return unpack(pack(arrays, platform).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray], platform: Platform) -> Tensor:
    """Pack the arrays into one staging buffer of bytes, each aligned for any dtype."""
    buffer = platform.staging([sum(_aligned(a.nbytes) for a in arrays)], torch.uint8)
    to, at = buffer.numpy(), 0
    for array in arrays:
        to[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _aligned(array.nbytes)
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Return the parts of a packed buffer on any device, with the shapes and dtypes of the packed arrays."""
    found, at = [], 0
    for array in arrays:
        part = buffer[at : at + array.nbytes].view(_torch_dtype(array.dtype))
        found.append(part if array.ndim == 1 else part.view(array.shape))
        at += _aligned(array.nbytes)
    return found


@lru_cache
def _torch_dtype(dtype: "np.dtype[np.generic]") -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Download:
    """Tensors of one device in transfer to the host. Only `wait` blocks."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._done: DeviceEvent | None = None
        self._host = list(tensors)
        platform = platform_of(tensors[0].device)
        if not platform.is_host:
            self._host = [platform.staging(t.shape, t.dtype).copy_(t, non_blocking=True) for t in tensors]
            self._done = platform.record_event()

    @property
    def is_ready(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> list[Tensor]:
        if self._done is not None:
            self._done.synchronize()
        return self._host
