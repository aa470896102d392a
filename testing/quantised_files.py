"""Writers of quantised checkpoints: a folder's matrices as GPTQ, AWQ, compressed-tensors or FP8 store them.

Each writer returns a matrix's tensors and its dequantised values, computed from the unpacked numbers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]


class Rounded(NamedTuple):
    """Values 0 to 2^bits - 1 `[out, in]`, scales and zero points `[out, groups]`, and the weights that they mean."""

    values: Tensor
    scales: Tensor
    zeros: Tensor
    weights: Tensor


def round_groups(weight: Tensor, bits: int, size: int, symmetric: bool, order: Tensor | None = None) -> Rounded:
    """Round to the nearest value, with an fp16 scale for each group of `size` inputs; order: the inputs' groups."""
    rows, columns = weight.shape
    order = torch.arange(columns) // size if order is None else order
    scales, zeros = torch.zeros(rows, columns // size), torch.zeros(rows, columns // size, dtype=torch.int32)
    most = (1 << bits) - 1
    for group in range(columns // size):
        part = weight[:, order == group]
        if symmetric:
            scales[:, group], zeros[:, group] = part.abs().amax(1) / (most // 2), 1 << (bits - 1)
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().int()
    scales = scales.half()
    by_input = scales.float()[:, order], zeros[:, order]
    values = (weight / by_input[0] + by_input[1]).round().clamp(0, most).int()
    return Rounded(values, scales, zeros, by_input[0] * (values - by_input[1]))


def pack(values: Tensor, bits: int, dim: int) -> Tensor:
    """Pack numbers along a dimension into int32 words, lowest bits first."""
    count = 32 // bits
    values = values.long().unflatten(dim, (-1, count))
    words = (values << torch.arange(0, 32, bits).view([-1 if d == dim + 1 else 1 for d in range(values.dim())])).sum(
        dim + 1
    )
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def gptq(weight: Tensor, bits: int, *, symmetric: bool, v2: bool = False, shuffled: bool = False) -> Written:
    size = 32
    order = torch.arange(weight.shape[1]) // size
    if shuffled:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(1))]
    found = round_groups(weight, bits, size, symmetric, order)
    stored = found.zeros if v2 else (found.zeros - 1) & (1 << bits) - 1
    tensors = {
        "qweight": pack(found.values.T, bits, 0), "qzeros": pack(stored.T, bits, 1),
        "scales": found.scales.T.contiguous(), "g_idx": order.int(),
    }  # fmt: skip
    return tensors, found.weights


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(weight: Tensor) -> Written:
    found = round_groups(weight, 4, 64, symmetric=False)

    def by_word(values: Tensor) -> Tensor:
        return pack(values.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4, 1)

    tensors = {"qweight": by_word(found.values), "qzeros": by_word(found.zeros), "scales": found.scales.T.contiguous()}
    return tensors, found.weights


def packed(weight: Tensor, bits: int, *, symmetric: bool) -> Written:
    found = round_groups(weight, bits, 64, symmetric)
    tensors = {
        "weight_packed": pack(found.values, bits, 1), "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = pack(found.zeros, bits, 0)
    return tensors, found.weights


def int8(weight: Tensor, *, symmetric: bool) -> Written:
    found = round_groups(weight, 8, weight.shape[1], symmetric)
    tensors = {"weight": (found.values - 128).to(torch.int8), "weight_scale": found.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return tensors, found.weights


def fp8(weight: Tensor, kind: str, block: tuple[int, int] = (48, 32)) -> Written:
    """kind: `tensor`, `channel` or `block`. block: outputs and inputs of a block."""
    scale = weight.abs().max() / 448
    name, scales, by_weight = "weight_scale", scale, scale
    if kind == "channel":
        scales = by_weight = weight.abs().amax(1, keepdim=True) / 448
    elif kind == "block":
        grid = torch.rand(-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])) * 0.01 + 0.001
        name, scales = "weight_scale_inv", grid
        by_weight = grid.repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)
        by_weight = by_weight[:, : weight.shape[1]]
    values = (weight / by_weight).to(torch.float8_e4m3fn)
    return {"weight": values, name: scales}, values.float() * by_weight


def write(
    folder: Path,
    out: Path,
    config: dict[str, Any],
    quantise: Callable[[Tensor], Written],
    quantised: tuple[str, ...] = ("model.layers.",),
) -> dict[str, Tensor]:
    """Write a checkpoint whose matrices with these beginnings are quantised; return the dequantised tensors of all."""
    tensors, meaning = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        meaning[name] = tensor
        if not name.startswith(quantised) or tensor.dim() == 1:
            tensors[name] = tensor
            continue
        parts, meaning[name] = quantise(tensor.float())
        tensors |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return meaning
