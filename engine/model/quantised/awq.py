"""AWQ checkpoints: int4 in groups of inputs with zero points, packed along the outputs (AutoAWQ's `gemm`)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.quantised.method import Coverage, Groups, Module, RawTensors, choose, unpack_words
from kernels.weights import LinearWeights

# Position of each of eight outputs in its 32-bit word, in units of four bits.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq:
    """`qweight` int32 `[in, out / 8]`, `qzeros` `[groups, out / 8]`, `scales` `[groups, out]`."""

    name = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError naming the field."""
        choose(config, "bits", (4,))
        version = config.get("version", "gemm")
        choose({"version": version.lower() if isinstance(version, str) else version}, "version", ("gemm",))
        self.layers = Coverage(config)

    def read(self, tensors: RawTensors, module: str, rows: int, columns: int) -> LinearWeights | None:
        m = Module(tensors, module, "awq int4")
        if not m.has("qweight"):
            return None
        groups = m.groups("scales")
        values = _by_output(m.take("qweight", (torch.int32,), columns, rows // 8))
        zeros = _by_output(m.take("qzeros", (torch.int32,), groups, rows // 8)) if m.has("qzeros") else None
        scales = m.scales("scales", groups, rows).T.contiguous()
        return m.in_groups(4, Groups(values, scales, zeros), rows, columns)


def _by_output(words: Tensor) -> Tensor:
    """Return the values of words `[n, out / 8]` as `[out, n]`."""
    return unpack_words(words, 4)[..., PLACES].flatten(1).T.contiguous()
