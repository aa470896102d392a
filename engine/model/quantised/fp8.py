"""FP8 checkpoints (e4m3) with one scale per tensor, output or block. Weights are dequantised when they are read."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.quantised.method import FIELD, Module, RawTensors
from kernels.weights import LinearWeights, dense
from wire.errors import ConfigError

# Names of the scales that multiply a weight, in files of DeepSeek and transformers, and in files of vLLM.
SCALES = ("weight_scale_inv", "weight_scale")


class Fp8:
    """`weight` float8_e4m3fn `[out, in]` with one scale, scales `[out, 1]`, or one scale per block of
    `weight_block_size` (config.json).
    """

    name = "fp8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError naming the field."""
        block = config.get("weight_block_size")
        sizes = block if isinstance(block, list) else []
        if block is not None and (len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes)):
            raise ConfigError(FIELD, f"weight_block_size: expected two sizes, got {str(block)[:40]}")
        self._block = (sizes[0], sizes[1]) if sizes else None

    def read(self, tensors: RawTensors, module: str, rows: int, columns: int) -> LinearWeights | None:
        m = Module(tensors, module, self.name)
        scales = next((name for name in SCALES if m.has(name)), None)
        if scales is None:
            return None
        return dequantised(m, m.take("weight", (torch.float8_e4m3fn,), rows, columns), scales, self._block)


def dequantised(m: Module, weight: Tensor, scales: str, block: tuple[int, int] | None) -> LinearWeights:
    """Return FP8 weights times their scales, in fp32."""
    rows, columns = weight.shape
    shape = m.raw(scales).shape
    factors = m.scales(scales, *shape).float()
    if shape in ((), (1,), (rows, 1)):
        return dense(weight.float() * factors)
    if block is None and len(shape) == 2:  # compressed-tensors: blocks of 128 by 128 weights
        block = (128, 128)
    expected = None if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    if block is None or shape != expected:
        raise m.error(scales, f"is {list(shape)}; expected one, [{rows}, 1], or one for each block")
    block = min(block[0], rows), min(block[1], columns)
    by_weight = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return dense(weight.float() * by_weight)
