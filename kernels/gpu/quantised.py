"""Products with weights of 8 and 4 bits: each tile of weights is widened in registers and multiplied on tensor cores.

Weights keep the layout that a reader returns (`kernels.weights.LinearWeights`): a decode step, bound by memory, reads a
half or a quarter of the bytes. Semantics: `kernels.reference.linear` without rounded inputs, except that each widened
int8 or int4 weight is rounded to x's dtype before the product. FP8 numbers fit into 16 bits, and their scales multiply
the sums of whole tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.schemes import TILE_INPUTS
from kernels.weights import OFFSETS, LinearWeights

BLOCK_N, BLOCK_K = 64, TILE_INPUTS
# Rows of x in a tile: for decoding, and for prompts.
FEW_ROWS, MANY_ROWS = 16, 64


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """Return `x W^T + bias`, `[T, out]` in x's dtype. x `[T, in]`, contiguous rows; weights int8, int4 or FP8.

    Raises ValueError for unsuitable shapes.
    """
    if x.dim() != 2 or x.shape[1] != weights.in_features or x.stride(1) != 1:
        raise ValueError(f"x: expected [T, {weights.in_features}] with contiguous rows, got {tuple(x.shape)}")
    scheme, tensors, bias = weights.scheme, weights.tensors, weights.bias
    values, scales = tensors["values"], tensors["scales"]
    is_fp8 = scheme.kind == "fp8"
    if is_fp8:
        values = values.view(torch.uint8)
    y = torch.empty(len(x), weights.out_features, dtype=x.dtype, device=x.device)
    rows = FEW_ROWS if len(x) <= FEW_ROWS else MANY_ROWS
    grid = (triton.cdiv(weights.out_features, BLOCK_N), triton.cdiv(len(x), rows))
    if len(x):
        _multiply[grid](
            x, values, scales, tensors[scheme.offsets] if scheme.offsets else scales,
            scales if bias is None else bias, y, len(x), x.stride(0), N=weights.out_features, K=weights.in_features,
            GROUPS=scales.shape[1], GROUP=scheme.group or weights.in_features, IS_INT4=scheme.kind == "int4",
            IS_FP8=is_fp8, OFFSETS=OFFSETS.index(scheme.offsets), HAS_BIAS=bias is not None, BLOCK_M=rows,
            BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4 if rows == FEW_ROWS else 8,
        )  # fmt: skip
    return y


# A new number of rows or another alignment must not compile a new variant of the kernel.
@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("x", "y"))
def _multiply(  # type: ignore[no-untyped-def]
    x, values, scales, offsets, bias, y, num_rows, x_stride, N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, IS_INT4: tl.constexpr, IS_FP8: tl.constexpr, OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y. OFFSETS: 1 for minimums, 2 for zero points. A byte of int4 holds an even and an odd input;
    each step multiplies the even inputs of its bytes, then the odd ones. values: FP8 numbers as bytes.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m, in_n = m < num_rows, n < N
    rows = x + m.to(tl.int64) * x_stride
    outputs = n.to(tl.int64)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    PARTS: tl.constexpr = 2 if IS_INT4 else 1
    for first in range(0, K, BLOCK_K * PARTS):
        j = tl.arange(0, BLOCK_K)
        at = first // PARTS + j
        stored = tl.load(
            values + outputs[None, :] * (K // PARTS) + at[:, None],
            mask=in_n[None, :] & (at < K // PARTS)[:, None],
            other=0,
        )
        for part in tl.static_range(PARTS):
            k = first + j * PARTS + part
            inputs = tl.load(rows[:, None] + k[None, :], mask=in_m[:, None] & (k < K)[None, :], other=0.0)
            if IS_FP8:
                scale = tl.load(scales + outputs * GROUPS + first // GROUP, mask=in_n, other=0.0)
                products = tl.dot(inputs, _widen_e4m3(stored).to(inputs.dtype), input_precision="ieee")
                sums += products * scale[None, :]
            else:
                seen = in_n[None, :] & (k < K)[:, None]
                group = outputs[None, :] * GROUPS + (k // GROUP)[:, None]
                scale = tl.load(scales + group, mask=seen, other=0.0).to(tl.float32)
                if IS_INT4:
                    number = ((stored >> (4 * part)) & 15).to(tl.float32)
                else:
                    number = stored.to(tl.float32)
                if OFFSETS == 2:
                    weight = scale * (number - tl.load(offsets + group, mask=seen, other=0).to(tl.float32))
                elif OFFSETS == 1:
                    weight = scale * number + tl.load(offsets + group, mask=seen, other=0.0).to(tl.float32)
                elif IS_INT4:
                    weight = scale * (number - 8.0)
                else:
                    weight = scale * number
                sums += tl.dot(inputs, weight.to(inputs.dtype), input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    to = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _widen_e4m3(stored):  # type: ignore[no-untyped-def]
    """Return FP8 numbers in fp32, from their bytes, because Triton has no e4m3 before compute capability 8.9.

    The bits of an fp16 number are in the same order, with an exponent that is larger by 8. NaN stays NaN.
    """
    magnitude = (stored & 0x7F).to(tl.uint16)
    bits = ((stored & 0x80).to(tl.uint16) << 8) | (magnitude << 7)
    number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), number)
