"""Interface of a device: every difference between devices outside of the ops, and the choice of the platform.

A new device is a `Platform` and a line in `kernels/devices.py`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.devices import DEVICES, KINDS
from kernels.ops import Ops

Step = Callable[[], Tensor]


class DeviceEvent(Protocol):
    """Point in the order of a device's work."""

    def synchronize(self) -> None:
        """Block the calling thread until all work before the event is done."""
        ...

    def query(self) -> bool:
        """Return whether all work before the event is done."""
        ...


class CopyStream(Protocol):
    """Sequence of copies that runs beside the steps' work.

    in_place: whether the device's memory is the host's, so that no copy is needed.
    """

    in_place: bool

    def record_event(self) -> DeviceEvent:
        """Record an event behind all work that the calling thread has launched, and return it."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Order all later copies behind the event. Does not block."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> DeviceEvent:
        """Start a copy from the host and return the event behind it. The source must not change until then. Both have
        one dtype and shape.
        """
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy the tensor to the device, ordered behind the last event. Returns when the result can be read."""
        ...


class Platform(Protocol):
    """Interface of a device.

    name: its kind, for messages. is_host: whether its memory is the host's, which numpy can read, and work is done when
    its call returns. On other devices work is launched, runs beside the host, and can be captured in a graph.
    has_ops: whether it computes; a simulated device does not. min_prompt_tokens: number of prompt tokens below which a
    step beside decodes takes hardly less time.
    """

    name: str
    is_host: bool
    has_ops: bool
    min_prompt_tokens: int

    def ops(
        self,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        kv_dtype: torch.dtype | None,
        lora_dtype: torch.dtype | None,
    ) -> Ops:
        """Return the fastest ops for these sizes and dtypes; see `pick_ops`."""
        ...

    def is_available(self) -> bool: ...

    def total_memory(self) -> int:
        """Return the device's bytes; of the host those that a container may use."""
        ...

    def used_memory(self) -> int:
        """Return the bytes in use: of a GPU by all processes, of the host by this process."""
        ...

    def watch_peak(self) -> Callable[[], int]:
        """Return a function that returns how far `used_memory` has risen at most since this call."""
        ...

    def release_memory(self) -> None:
        """Return memory that is kept for later tensors to the device."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, *, huge_pages: bool = False) -> Tensor:
        """Return zeros. huge_pages: for large tables that are read sequentially, where the device has such pages."""
        ...

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised host memory. Copies between it and the device do not block."""
        ...

    def record_event(self) -> DeviceEvent:
        """Record an event behind all work that the calling thread has launched, and return it."""
        ...

    def copy_stream(self) -> CopyStream: ...

    def capture(self, step: Step, pool: Any) -> tuple[Step, Any]:
        """Capture a step as a graph. Return its replay, and the memory pool to pass to the next capture.

        pool: None for the first. A replay's result is valid until the next replay of the same pool.
        """
        ...


@cache
def platform_of(device: torch.device) -> Platform:
    """Return the platform of a device. Raises ValueError for an unknown kind of device."""
    for kind in KINDS:
        if kind.torch_type == device.type:
            # Imported here, because a platform's modules need what only its machines have.
            platform: Platform = getattr(import_module(kind.module), kind.platform)(device)
            return platform
    raise ValueError(f"device: expected one of {', '.join(kind.torch_type for kind in KINDS)}, got {device.type}")


def default_device() -> torch.device:
    """Return the fastest device of this machine."""
    devices = (torch.device(kind.torch_type) for kind in reversed(DEVICES.values()))
    return next(device for device in devices if platform_of(device).is_available())


def pick_ops(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    lora_dtype: torch.dtype | None = None,
) -> Ops:
    """Select the ops: Triton on a GPU; on the CPU the native library if a compiler is available, else plain torch.

    kv_dtype, lora_dtype: dtypes of the caches and the rank pages; None for the model's. The native library does not
    support 8 bits; plain torch serves these.
    """
    return platform_of(device).ops(dtype, head_dim, block_size, kv_dtype, lora_dtype)
