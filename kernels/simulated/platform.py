"""`kernels.platform.Platform` of a simulated device: tensors without memory (torch's `meta`), copies without effect.

It measures the host's share of a step and has no ops: `engine.execution.simulated` computes its steps.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from kernels.synchronous import SynchronousCopyStream, SynchronousPlatform


class SimulatedPlatform(SynchronousPlatform):
    name = "simulated device"
    is_host = False
    has_ops = False
    # The GPU's, so that prompts are cut as there.
    min_prompt_tokens = 256

    def ops(self, *_: object) -> NoReturn:
        raise NotImplementedError("a simulated device runs no ops")

    def total_memory(self) -> int:
        return sys.maxsize

    def used_memory(self) -> int:
        return 0

    def watch_peak(self) -> Callable[[], int]:
        return lambda: 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, *, huge_pages: bool = False) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def copy_stream(self) -> "SimulatedCopyStream":
        return SimulatedCopyStream()


class SimulatedCopyStream(SynchronousCopyStream):
    """Copy stream whose copies take no time. The host packs each row as for a GPU."""

    in_place = False

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.to("meta")
