"""FP8 checkpoints (e4m3) with one scale per tensor, output or block."""

from collections.abc import Mapping
from typing import Any

from engine.model.quantised.method import FIELD, Coverage, Module, RawTensors
from kernels.weights import FP8, LinearWeights, fp8
from wire.errors import ConfigError
from wire.json_values import as_json

# Names of the scales that multiply a weight, in files of DeepSeek and transformers, and in files of vLLM.
SCALES = ("weight_scale_inv", "weight_scale")
# Name of the dtype in safetensors files.
E4M3 = "F8_E4M3"


class Fp8:
    """`weight` float8_e4m3fn `[out, in]` with one scale, scales `[out, 1]`, or one scale per block of
    `weight_block_size` (config.json).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError naming the field."""
        self.name: str = config["quant_method"]
        self.layers = Coverage(config)
        block = config.get("weight_block_size")
        sizes = block if isinstance(block, list) else []
        if block is not None and (len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes)):
            raise ConfigError(FIELD, f"weight_block_size: expected two sizes, got {as_json(block)}")
        self._block = (sizes[0], sizes[1]) if sizes else None

    def read(self, tensors: RawTensors, module: str, rows: int, columns: int) -> LinearWeights | None:
        m = Module(tensors, module, self.name)
        scales = next((name for name in SCALES if m.has(name)), None)
        if not is_fp8(m) and scales is None:
            return None
        return read_weights(m, rows, columns, scales or SCALES[self._block is None], self._block)


def is_fp8(m: Module) -> bool:
    """Return whether a module's weights are FP8. Raises ConfigError for other numbers of FP8 than e4m3."""
    stored = m.stored_dtype("weight")
    if stored.startswith("F8_") and stored != E4M3:
        raise m.error("weight", f"{stored}; expected {E4M3}")
    return stored == E4M3


def read_weights(m: Module, rows: int, columns: int, scales: str, block: tuple[int, int] | None) -> LinearWeights:
    """Return FP8 weights `[rows, columns]`. scales: the tensor's name. block: outputs and inputs that share a scale.

    Raises ConfigError, naming the tensor, for one that is missing, damaged, or has another shape or dtype.
    """
    values = m.take("weight", (FP8,), rows, columns)
    shape = m.raw(scales).shape
    factors = m.scales(scales, *shape).float()
    if shape in ((), (1,), (1, 1), (rows, 1)):
        return fp8(values, factors.reshape(-1, 1).expand(rows, 1))
    if block is None and len(shape) == 2:  # compressed-tensors: blocks of 128 by 128 weights
        block = (128, 128)
    expected = None if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    if block is None or shape != expected:
        raise m.error(scales, f"{list(shape)}; expected one, [{rows}, 1], or one for each block")
    return fp8(values, factors.repeat_interleave(min(block[0], rows), 0)[:rows], block[1])
