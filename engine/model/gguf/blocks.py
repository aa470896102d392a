"""Conversion of ggml's quantised blocks to the schemes of `kernels.weights`, without changing any weight.

A block has 32 weights; a K-quant block has 256, in groups of 16 or 32. ggml-common.h and ggml-quants.c define the
bytes. In K-quants a group's scale is an integer times the block's fp16 scale; this product is exact in fp32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.weights import Kind, LinearWeights, pack_halves, quantised

_BLOCK, _SUPER = 32, 256


class _Groups(NamedTuple):
    """Converted blocks: values int8 `[n, weights]` (int4: 0 to 15), scales and mins `[n, groups]`."""

    kind: Kind
    values: Tensor
    scales: Tensor
    mins: Tensor | None = None


def read_blocks(kind: str, data: Tensor) -> LinearWeights:
    """Convert rows of blocks, uint8 `[rows, bytes]`, to a linear layer's weights."""
    block_bytes, read = KEPT[kind]
    found = read(data.view(-1, block_bytes))
    rows = len(data)
    values = found.values.reshape(rows, -1)
    scales, mins = (None if part is None else part.reshape(rows, -1) for part in (found.scales, found.mins))
    assert scales is not None
    in_features = values.shape[1]
    if found.kind == "int4":
        values = pack_halves(values)
    return quantised(found.kind, values.contiguous(), scales, in_features, "" if mins is None else "mins", mins)


def _half(data: Tensor) -> Tensor:
    """Return two bytes per block as fp16 `[n, 1]`."""
    return data.contiguous().view(torch.float16)


def _halves(data: Tensor) -> Tensor:
    """Return the low halves of the bytes, then the high halves, as int8."""
    return torch.cat((data & 15, data >> 4), -1).char()


def _q8_0(data: Tensor) -> _Groups:
    return _Groups("int8", data[:, 2:].view(torch.int8), _half(data[:, :2]))


def _q4_0(data: Tensor) -> _Groups:
    return _Groups("int4", _halves(data[:, 2:]), _half(data[:, :2]))


def _q4_1(data: Tensor) -> _Groups:
    return _Groups("int4", _halves(data[:, 4:]), _half(data[:, :2]), _half(data[:, 2:4]))


def _fifth_bits(data: Tensor) -> Tensor:
    """Return the fifth bits of 32 weights, times 16: int8 `[n, 32]`. Bit i of the four bytes belongs to weight i."""
    bits = data[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1).char() * 16


def _q5_0(data: Tensor) -> _Groups:
    return _Groups("int8", _halves(data[:, 6:]) + _fifth_bits(data[:, 2:6]) - 16, _half(data[:, :2]))


def _q5_1(data: Tensor) -> _Groups:
    values = _halves(data[:, 8:]) + _fifth_bits(data[:, 4:8])
    return _Groups("int8", values, _half(data[:, :2]), _half(data[:, 2:4]))


def _k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minimums of the eight groups of Q4_K and Q5_K blocks, fp32 `[n, 8]`. Stored in six bits."""
    d, dmin = _half(data[:, :2]).float(), _half(data[:, 2:4]).float()
    first, second, third = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return d * scales.float(), -(dmin * mins.float())


def _pairs(data: Tensor) -> Tensor:
    """Return the low halves of 32 bytes, then their high halves, then those of the next 32 bytes, `[n, 256]` int8."""
    return _halves(data.unflatten(1, (-1, 32))).flatten(1)


def _q4_k(data: Tensor) -> _Groups:
    return _Groups("int4", _pairs(data[:, 16:]), *_k_scales(data))


def _q5_k(data: Tensor) -> _Groups:
    bits = data[:, 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1
    fifth = bits.transpose(1, 2).flatten(1).char() * 16
    return _Groups("int8", _pairs(data[:, 48:]) + fifth, *_k_scales(data))


def _q6_k(data: Tensor) -> _Groups:
    low = torch.stack((data[:, :128] & 15, data[:, :128] >> 4), 1).unflatten(-1, (2, 64))
    high = data[:, 128:192].unflatten(1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    # Each half of a block: 64 low halves, then 64 high halves; bits 5 and 6 in four runs of 32.
    values = low.transpose(1, 2).flatten(1).char() + high.flatten(1).char() * 16 - 32
    d = _half(data[:, 208:]).float()
    return _Groups("int8", values, d * data[:, 192:208].view(torch.int8).float())


# By ggml type: bytes per block, and reader. Other types are dequantised when they are read.
KEPT: dict[str, tuple[int, Callable[[Tensor], _Groups]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
