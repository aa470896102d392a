"""GPTQ checkpoints: int4 and int8 in groups of inputs, packed along the inputs (AutoGPTQ, GPTQModel)."""

from collections.abc import Mapping
from typing import Any

import torch

from engine.model.quantised.method import FIELD, Coverage, Groups, Module, RawTensors, choose, names_of, unpack_words
from kernels.weights import LinearWeights
from wire.errors import ConfigError
from wire.json_values import as_json


class Gptq:
    """`qweight` int32 `[in / n, out]` with n values per word; `qzeros` `[groups, out / n]`; `scales` `[groups, out]`;
    `g_idx` `[in]`. The format `gptq` stores zero points minus 1.
    """

    name = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError naming the field."""
        self._bits: int = choose(config, "bits", (4, 8))
        self._is_v1 = choose(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
        self.layers = _coverage(config)

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


def _coverage(config: Mapping[str, Any]) -> Coverage:
    """Return the quantised layers: those of `modules_in_block_to_quantize` (transformers) if it is given, without those
    that `dynamic` (GPTQModel) leaves out. Raises ConfigError.
    """
    field = "modules_in_block_to_quantize"
    blocks, dynamic = config.get(field), config.get("dynamic") or {}
    if isinstance(blocks, list):
        blocks = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
    if not isinstance(dynamic, dict):
        raise ConfigError(FIELD, f"dynamic: expected an object, got {as_json(dynamic)}")
    without = [name.removeprefix("-:") for name in dynamic if name.startswith("-:")]
    return Coverage(config, names_of({field: blocks}, field) or None, without)
