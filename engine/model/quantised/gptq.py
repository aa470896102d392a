"""GPTQ checkpoints: int4 and int8 in groups of inputs, packed along the inputs (AutoGPTQ, GPTQModel)."""

from collections.abc import Mapping
from typing import Any

import torch

from engine.model.quantised.method import Groups, Module, RawTensors, choose, unpack_words
from kernels.weights import LinearWeights


class Gptq:
    """`qweight` int32 `[in / n, out]` with n values per word; `qzeros` `[groups, out / n]`; `scales` `[groups, out]`;
    `g_idx` `[in]`. The format `gptq` stores zero points minus 1.
    """

    name = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError naming the field."""
        self._bits: int = choose(config, "bits", (4, 8))
        self._is_v1 = choose(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"

    def read(self, tensors: RawTensors, module: str, rows: int, columns: int) -> LinearWeights | None:
        bits, m = self._bits, Module(tensors, module, f"gptq int{self._bits}")
        if not m.has("qweight"):
            return None
        in_word, groups = 32 // bits, m.groups("scales")
        words = m.take("qweight", (torch.int32,), columns // in_word, rows)
        values = unpack_words(words.T.contiguous(), bits).flatten(1)
        zeros = unpack_words(m.take("qzeros", (torch.int32,), groups, rows // in_word), bits).flatten(1)
        if self._is_v1:
            zeros = (zeros + 1) & (1 << bits) - 1
        order = m.take("g_idx", (torch.int32,), columns) if m.has("g_idx") else None
        scales = m.scales("scales", groups, rows).T.contiguous()
        return m.in_groups(bits, Groups(values, scales, zeros.T.contiguous(), order), rows, columns)
