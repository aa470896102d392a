"""Weights of linear layers: the one type that readers return and backends pack, and rounding to 8 and 4 bits.

A quantised scheme divides each output's inputs into groups. A group's weights are `scale * value` (int8), `scale *
(value - 8)` (int4), `scale * value + minimum` with minimums, or `scale * (value - zero)` with zero points. FP8 weights
are `scale * value`, where value is an e4m3 number. Scales keep the checkpoint's dtype or are widened to fp32, so that
the weights in memory have exactly the checkpoint's values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["dense", "int8", "int4", "fp8"]
# Group sizes that backends pack. A checkpoint's larger groups are cut into these, all with the same scale.
GROUP = 32
GROUPS = (16, GROUP)
# Number of weights that are rounded at a time.
PIECE = 1 << 18
# Stored int4 value of a zero weight, in schemes without offsets: the middle of 0 to 15.
MIDDLE = 8
Offsets = Literal["", "mins", "zeros"]
OFFSETS: tuple[Offsets, ...] = ("", "mins", "zeros")
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Scheme(NamedTuple):
    """Storage format of a linear layer's weights.

    kind: `dense` weights have the model's dtype and no other field. group: number of inputs that share a scale; FP8
    and int8 weights may have 0, a scale for all inputs of an output. scale_dtype: dtype of the scales and minimums.
    offsets: whether each group has a minimum, or a zero point (int4 only).
    """

    kind: Kind = "dense"
    group: int = 0
    scale_dtype: torch.dtype | None = None
    offsets: Offsets = ""

    def __str__(self) -> str:
        if self.kind == "dense":
            return self.kind
        if not self.group:
            return f"{self.kind} with a scale for each output"
        offsets = {"": "", "mins": " with minimums", "zeros": " with zero points"}[self.offsets]
        return f"{self.kind} in groups of {self.group}{offsets}"


DENSE = Scheme()
SERVED = "dense, and int8 and int4 in groups of 16 or 32"
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Weights of a linear layer, `[out_features, in_features]`, as a reader returns them or as `Ops.pack` does.

    tensors, as a reader returns them: `weight` `[out, in]` (dense), or `values`, `scales`, and `mins` or `zeros`.
    `values`: int8 `[out, in]` (int8), uint8 `[out, in / 2]` with even inputs in the low halves of the bytes (int4), or
    float8_e4m3fn `[out, in]` (FP8). `scales`, `mins` and `zeros` (uint8): `[out, ceil(in / group)]`; without groups
    `[out, 1]`. `bias` `[out]` is optional. `Ops.pack` returns the same tensors, or replaces all but `bias` by `packed`
    in the backend's layout.
    """

    scheme: Scheme
    tensors: Mapping[str, Tensor]
    in_features: int
    out_features: int

    @property
    def bias(self) -> Tensor | None:
        return self.tensors.get("bias")

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())

    def rows(self, index: Tensor) -> "LinearWeights":
        """Return the weights of some outputs. index: int64 `[n]`. The layer must not be packed."""
        tensors = {name: take(tensor, index) for name, tensor in self.tensors.items()}
        return LinearWeights(self.scheme, tensors, self.in_features, len(index))

    def to(self, device: torch.device) -> "LinearWeights":
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return LinearWeights(self.scheme, tensors, self.in_features, self.out_features)

    def with_bias(self, bias: Tensor | None) -> "LinearWeights":
        if bias is None:
            return self
        return LinearWeights(self.scheme, {**self.tensors, "bias": bias}, self.in_features, self.out_features)


def dense(weight: Tensor, bias: Tensor | None = None) -> LinearWeights:
    """Wrap a weight `[out, in]` in the model's dtype."""
    return LinearWeights(DENSE, {"weight": weight}, weight.shape[1], weight.shape[0]).with_bias(bias)


def take(table: Tensor, rows: Tensor) -> Tensor:
    """Return `table[rows]` for any dtype; torch indexes FP8 only as bytes."""
    return table.view(torch.uint8)[rows].view(table.dtype) if table.dtype == FP8 else table[rows]


def fp8(values: Tensor, scales: Tensor, group: int = 0) -> LinearWeights:
    """Return FP8 weights. values: float8_e4m3fn `[out, in]`. scales: fp32 `[out, ceil(in / group)]`, or `[out, 1]`
    without groups.
    """
    scheme = Scheme("fp8", 0 if scales.shape[1] == 1 else group, torch.float32)
    tensors = {"values": values, "scales": scales.contiguous()}
    return LinearWeights(scheme, tensors, values.shape[1], values.shape[0])


def int8_by_output(values: Tensor, scales: Tensor) -> LinearWeights:
    """Return int8 weights with a scale for each output. values: int8 `[out, in]`. scales: `[out, 1]`."""
    tensors = {"values": values, "scales": scales.float().contiguous()}
    return LinearWeights(Scheme("int8", 0, torch.float32), tensors, values.shape[1], values.shape[0])


def is_int8_by_output(scheme: Scheme) -> bool:
    return scheme.kind == "int8" and not scheme.group


def divided(weights: LinearWeights) -> LinearWeights:
    """Return the same weights in groups of GROUP, if they are int8 with a scale for each output. Raises ValueError for
    a number of inputs that groups do not divide.
    """
    if not is_int8_by_output(weights.scheme):
        return weights
    return quantised("int8", weights.tensors["values"], weights.tensors["scales"], weights.in_features)


def quantised(
    kind: Kind,
    values: Tensor,
    scales: Tensor,
    in_features: int,
    offsets: Offsets = "",
    offset_values: Tensor | None = None,
) -> LinearWeights:
    """Return the weights of these values and scales (see `LinearWeights`). offset_values: the minimums or
    zero points.

    Groups larger than GROUP are divided into groups of GROUP inputs with the same scale, which changes no weight.
    Raises ValueError if in_features is not divisible by the number of groups, or the group size is neither 16 nor a
    multiple of 32.
    """
    groups = scales.shape[1]
    size = in_features // groups
    if size * groups != in_features or (size not in GROUPS and size % GROUP):
        raise ValueError(f"{groups} groups of {in_features} inputs: expected groups of 16, or of a multiple of 32")
    group = min(size, GROUP)
    tensors = {"values": values, "scales": scales} | ({} if offset_values is None else {offsets: offset_values})
    if size > group:
        for name in tensors.keys() - {"values"}:
            tensors[name] = tensors[name].repeat_interleave(size // group, 1)
    scheme = Scheme(kind, group, scales.dtype, offsets)
    return LinearWeights(scheme, tensors, in_features, values.shape[0])


def concatenated(parts: Sequence[LinearWeights]) -> LinearWeights:
    """Return one layer with the outputs of several layers of the same inputs. All are quantised, without bias, and
    either all or none are FP8.

    If their schemes differ, the result has a scheme that represents all their weights exactly.
    """
    if len(parts) == 1:
        return parts[0]
    if len({part.scheme for part in parts}) > 1:
        parts = [divided(part) for part in parts]
        groups = [part.scheme.group for part in parts]
        if parts[0].scheme.kind == "fp8":
            parts = [_in_groups(part, math.gcd(*groups)) for part in parts]
        else:
            parts = [_generalised(part, min(groups)) for part in parts]
    first = parts[0]
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in first.tensors}
    return LinearWeights(first.scheme, tensors, first.in_features, sum(part.out_features for part in parts))


def _in_groups(weights: LinearWeights, group: int) -> LinearWeights:
    """Return the same FP8 weights with a scale for each `group` inputs. group: divisor of their group size."""
    count = -(-weights.in_features // group)
    size = weights.scheme.group or count * group
    scales = weights.tensors["scales"].repeat_interleave(size // group, 1)[:, :count]
    return fp8(weights.tensors["values"], scales, group)


def _generalised(weights: LinearWeights, group: int) -> LinearWeights:
    """Return the same weights as int8 with minimums and fp32 scales. group: divisor of their group size."""
    scheme, tensors = weights.scheme, weights.tensors
    values = tensors["values"]
    if scheme.kind == "int4":
        values = unpack_halves(values).char() - (0 if scheme.offsets else MIDDLE)
    count = -(-weights.in_features // group)

    def by_group(name: str) -> Tensor:
        return tensors[name].float().repeat_interleave(scheme.group // group, 1)[:, :count]

    scales = by_group("scales")
    mins = torch.zeros_like(scales)
    if scheme.offsets:
        mins = by_group("mins") if scheme.offsets == "mins" else -scales * by_group("zeros")
    found = {"values": values, "scales": scales, "mins": mins}
    return LinearWeights(Scheme("int8", group, torch.float32, "mins"), found, weights.in_features, weights.out_features)


def pack_halves(values: Tensor) -> Tensor:
    """Pack values from 0 to 15, `[out, in]`, as uint8 `[out, in / 2]` with even inputs in the low halves.

    Raises ValueError for an odd number of inputs.
    """
    if values.shape[1] % 2:
        raise ValueError(f"int4 needs an even number of inputs, got {values.shape[1]}")
    values = values.to(torch.uint8)
    return values[:, ::2] | values[:, 1::2] << 4


def unpack_halves(packed: Tensor) -> Tensor:
    """Undo `pack_halves`. Returns uint8 `[out, in]`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def round_to_int8(weight: Tensor) -> LinearWeights:
    """Quantise `[out, in]` to int8 in groups of 32 with fp16 scales, the form of GGUF's Q8_0.

    An incomplete last group is padded with zeros.
    """
    return _round_in_pieces("int8", weight, _round_to_int8)


def _round_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = (x.abs().amax(-1) / 127).to(torch.float16)
    return (x / _divisors(scales)[..., None]).round_().clamp_(-127, 127).to(torch.int8), scales


# Largest representable magnitudes that int4 tries for each group, as multiples of the group's largest weight: a little
# clipping costs less than coarse steps. On normally distributed weights the search reduces the mean squared error to
# 0.93 of that without it.
_CLIPPING = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def round_to_int4(weight: Tensor) -> LinearWeights:
    """Quantise `[out, in]` to int4 in groups of 32 with fp16 scales, the form of GGUF's Q4_0.

    The range -8 to 7 is asymmetric: the scale's sign is chosen so that the weight of the largest magnitude becomes -8.
    Each group gets the scale with the least squared error of those in `_CLIPPING`. Raises ValueError for an odd number
    of inputs.
    """
    found = _round_in_pieces("int4", weight, _round_to_int4)
    tensors = {**found.tensors, "values": pack_halves(found.tensors["values"])}
    return LinearWeights(found.scheme, tensors, found.in_features, found.out_features)


def _round_to_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))[..., 0]
    best = torch.full_like(largest, torch.inf)
    scales = torch.zeros_like(largest, dtype=torch.float16)
    values = torch.zeros_like(x, dtype=torch.uint8)
    for share in _CLIPPING:
        tried = (largest * (share / -MIDDLE)).to(torch.float16)
        rounded = (x / _divisors(tried)[..., None]).round_().clamp_(-MIDDLE, MIDDLE - 1)
        error = (rounded * tried[..., None].float()).sub_(x).square_().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, tried, scales)
        values = torch.where(better[..., None], (rounded + MIDDLE).to(torch.uint8), values)
    return values, scales


def _round_in_pieces(
    kind: Kind, weight: Tensor, round_groups: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> LinearWeights:
    """Round `[out, in]` a few outputs at a time, because the system maps new pages for each large temporary tensor.

    round_groups: returns the values and scales of `[out, groups, GROUP]` fp32.
    """
    rows, columns = weight.shape
    missing, found = -columns % GROUP, []
    if weight.is_meta:  # a model that is only described, for its size
        values = weight.new_empty(rows, columns, dtype=torch.int8 if kind == "int8" else torch.uint8)
        scales = weight.new_empty(rows, (columns + missing) // GROUP, dtype=torch.float16)
    else:
        for part in weight.split(max(1, PIECE // columns)):
            x = torch.nn.functional.pad(part.float(), (0, missing)).unflatten(1, (-1, GROUP))
            rounded, scales = round_groups(x)
            found.append((rounded.flatten(1)[:, :columns], scales))
        values, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
    return LinearWeights(Scheme(kind, GROUP, scales.dtype), {"values": values, "scales": scales}, columns, rows)


def _divisors(scales: Tensor) -> Tensor:
    """Return the scales in fp32, with 1 in place of 0 (groups of zeros)."""
    scales = scales.float()
    return torch.where(scales == 0, 1.0, scales)
