"""Choice of the ops' implementation for a device, made once at engine start."""

import torch

from kernels.ops import Ops
from kernels.reference import LARGEST


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
    if device.type == "cuda":
        from kernels.gpu.ops import TritonOps

        return TritonOps()
    from kernels.cpu.native import NativeOps
    from kernels.cpu.native_build import load
    from kernels.cpu.plain import TorchOps

    native = NativeOps.serves(dtype, head_dim, block_size) and not {kv_dtype, lora_dtype} & LARGEST.keys()
    library = load() if native else None
    if library is not None:
        return NativeOps(library)
    return TorchOps()
