"""`kernels.platform.Platform` of the CPU: one memory, and calls that return when their work is done."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from kernels.cgroups import memory_limit, read
from kernels.memory import lazy_zeros
from kernels.ops import Ops
from kernels.synchronous import SynchronousCopyStream, SynchronousPlatform


class CpuPlatform(SynchronousPlatform):
    name = "machine"
    is_host = True
    has_ops = True
    # Each row takes its time here: 16 tokens after thousands of keys triple a step of 8 decodes.
    min_prompt_tokens = 4

    def ops(
        self,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        kv_dtype: torch.dtype | None,
        lora_dtype: torch.dtype | None,
    ) -> Ops:
        from kernels.cpu.native import NativeOps
        from kernels.cpu.native_build import load
        from kernels.cpu.plain import TorchOps

        library = load() if NativeOps.can_run(dtype, head_dim, block_size, kv_dtype, lora_dtype) else None
        return TorchOps() if library is None else NativeOps(library)

    def total_memory(self) -> int:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(physical, memory_limit() or physical)

    def used_memory(self) -> int:
        return _resident("VmRSS")

    def watch_peak(self) -> Callable[[], int]:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = _resident("VmRSS")
        return lambda: max(0, _resident("VmHWM") - before)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, *, huge_pages: bool = False) -> Tensor:
        return lazy_zeros(shape, dtype, huge_pages=huge_pages)

    def copy_stream(self) -> "HostCopyStream":
        return HostCopyStream()


def _resident(field: str) -> int:
    """Return a size of /proc/self/status in bytes; 0 on systems without it."""
    for line in read(Path("/proc/self/status")).splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    return 0


class HostCopyStream(SynchronousCopyStream):
    """Copy stream of a device that is the host."""

    in_place = True

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor
