"""Checkpoints of compressed-tensors (llm-compressor): int4, int8 and FP8. A module's tensors tell its scheme.

The checkpoint's input scales are ignored: backends round inputs with finer scales of their own, or not at all.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.quantised.fp8 import is_fp8, read_weights
from engine.model.quantised.method import FIELD, Coverage, Groups, Module, RawTensors, choose, names_of, unpack_words
from kernels.weights import GROUP, LinearWeights, int8_by_output
from wire.errors import ConfigError
from wire.json_values import as_json

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


class CompressedTensors:
    """Packed modules have `weight_packed` int32 `[out, in / n]` with n values per word, and optionally
    `weight_zero_point` `[out / n, groups]`. Others have `weight` int8 or FP8, and optionally `weight_zero_point` int8
    `[out, groups]`. Both have `weight_scale` `[out, groups]`, or one scale for the whole tensor. Only checkpoints whose
    inputs have 8 bits too (W8A8) have int8 weights that are not packed.
    """

    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError naming the field."""
        choose(config, "format", FORMATS, "dense")
        for field in ("transform_config", "sparsity_config"):
            given = config.get(field) or {}
            if given and not (isinstance(given, dict) and given.get("format") == "dense"):
                raise ConfigError(FIELD, f"{field} is not served; use a checkpoint without it")
        self.layers = Coverage(config, _targets(config))

    def read(self, tensors: RawTensors, module: str, rows: int, columns: int) -> LinearWeights | None:
        m = Module(tensors, module, self.name)
        if m.has("weight_packed"):
            return self._packed(m, rows, columns)
        if is_fp8(m):
            return read_weights(m, rows, columns, "weight_scale", None)
        if m.stored_dtype("weight") != "I8" and not m.has("weight_scale"):
            return None
        weight = m.take("weight", (torch.int8,), rows, columns)
        scales = self._scales(m, rows)
        zeros = None
        if m.has("weight_zero_point"):
            zeros = m.take("weight_zero_point", (torch.int8,), *m.raw("weight_scale").shape)
            zeros = zeros if zeros.dim() == 2 else zeros.reshape(1, 1)
            zeros = zeros.to(torch.int16).expand(rows, -1) + 128 if zeros.any() else None
        if zeros is None and scales.shape[1] == 1 and columns % GROUP == 0:
            return int8_by_output(weight, scales)
        values = (weight.to(torch.int16) + 128).to(torch.uint8)
        return m.in_groups(8, Groups(values, scales, zeros, self._order(m, columns)), rows, columns)

    def _packed(self, m: Module, rows: int, columns: int) -> LinearWeights:
        words = m.raw("weight_packed")
        bits = next((bits for bits in (4, 8) if words.shape == (rows, -(-columns * bits // 32))), None)
        if bits is None or words.dtype != torch.int32:
            raise m.error("weight_packed", f"{list(words.shape)}; expected int32 {rows} rows of 4 or 8 bits")
        values = unpack_words(words, bits).flatten(1)[:, :columns]
        scales, zeros = self._scales(m, rows), None
        if m.has("weight_zero_point"):
            shape = -(-rows * bits // 32), scales.shape[1]
            packed = m.take("weight_zero_point", (torch.int32,), *shape)
            zeros = unpack_words(packed.T.contiguous(), bits).flatten(1)[:, :rows].T.contiguous()
        return m.in_groups(bits, Groups(values, scales, zeros, self._order(m, columns)), rows, columns)

    def _scales(self, m: Module, rows: int) -> Tensor:
        """Return the scales `[rows, groups]`."""
        shape = m.raw("weight_scale").shape
        if shape in ((), (1,), (1, 1)):
            return m.scales("weight_scale", *shape).reshape(1, 1).expand(rows, 1)
        return m.scales("weight_scale", rows, shape[-1])

    def _order(self, m: Module, columns: int) -> Tensor | None:
        return m.take("weight_g_idx", (torch.int32,), columns) if m.has("weight_g_idx") else None


def _targets(config: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the layers that `config_groups` quantises, None for all linear layers. Raises ConfigError."""
    groups = config.get("config_groups")
    if groups is None:
        return None
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError(FIELD, f"config_groups: expected an object of objects, got {as_json(groups)}")
    # A group without weights quantises activations only.
    names = [name for group in groups.values() if group.get("weights") for name in names_of(group, "targets")]
    return None if "Linear" in names else names
