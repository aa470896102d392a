"""Products with FP8 and int8 weights on tensor cores that multiply 8-bit numbers, by torch's products.

Inputs are rounded to the weights' dtype too, with a scale for each row: no row's scale depends on another request's,
and a NaN or an infinity stays in its row. Semantics: `kernels.reference.linear` with rounded inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import LARGEST, SMALLEST_AMAX
from kernels.weights import FP8, LinearWeights

# First compute capability whose tensor cores multiply FP8. All that Triton serves multiply int8.
CAPABILITY = (8, 9)
# Torch's products require sizes that are multiples of this.
SIZE = 16
# Least number of rows of torch's int8 product on a GPU.
INT8_ROWS = 32
# Elements of a row for each warp that rounds it, and of a tile of sums.
WARP_ELEMENTS = 2048
SUMS = 1024


def can_multiply(x: Tensor, weights: LinearWeights, has_fp8: bool) -> bool:
    """Return whether these products serve the weights. has_fp8: whether the device has CAPABILITY.

    The weights have a scale for each output, and x is bfloat16: in other dtypes inputs are not rounded.
    """
    is_by_output = not weights.scheme.group and weights.scheme.kind in (("int8", "fp8") if has_fp8 else ("int8",))
    has_fitting_size = weights.in_features % SIZE == 0 and weights.out_features % SIZE == 0
    return is_by_output and has_fitting_size and x.dtype == torch.bfloat16


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """Return `x W^T + bias`, `[T, out]` in x's dtype; FP8 sums in fp32, int8 sums in int32. x `[T, in]`, contiguous
    rows; see `can_multiply`.
    """
    if weights.scheme.kind == "int8":
        return _int8_linear(x, weights)
    values, scales = round_rows(x, FP8)
    # torch.nn.functional.scaled_mm calls the same kernels, but torch 2.9 lacks it.
    return torch._scaled_mm(
        values, weights.tensors["values"].t(), scales[:, None], weights.tensors["scales"].t(), weights.bias,
        out_dtype=x.dtype,
    )  # fmt: skip


def _int8_linear(x: Tensor, weights: LinearWeights) -> Tensor:
    values, scales = round_rows(x, torch.int8, least_rows=INT8_ROWS)
    sums, bias = torch._int_mm(values, weights.tensors["values"].t()), weights.bias
    y = torch.empty(len(x), weights.out_features, dtype=x.dtype, device=x.device)
    if len(x):
        _scale_sums[(len(x), triton.cdiv(weights.out_features, SUMS))](
            sums, scales, weights.tensors["scales"], scales if bias is None else bias, y, N=weights.out_features,
            HAS_BIAS=bias is not None, BLOCK=SUMS,
        )  # fmt: skip
    return y


def round_rows(x: Tensor, dtype: torch.dtype, least_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Return x `[T, width]` in an 8-bit dtype, and its scales `[T]` fp32, as `kernels.reference.quantize_rows` does.

    The scale of a row with a NaN or an infinity is NaN if the dtype is int8. If T is below least_rows, rows of any
    values follow. Raises ValueError for rows that are not contiguous.
    """
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x: expected [T, in] with contiguous rows, got {tuple(x.shape)}")
    width = x.shape[1]
    values = torch.empty(max(least_rows, len(x)), width, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        block = triton.next_power_of_2(width)
        _round_rows[(len(x),)](
            x, values, scales, x.stride(0), WIDTH=width, BLOCK=block, LARGEST=LARGEST[dtype],
            SMALLEST_AMAX=SMALLEST_AMAX, num_warps=min(16, max(1, block // WARP_ELEMENTS)),
        )  # fmt: skip
    return values, scales


# Another alignment must not compile a new variant of the kernel.
@triton.jit(do_not_specialize_on_alignment=("x",))
def _round_rows(  # type: ignore[no-untyped-def]
    x, values, scales, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(numbers), 0), SMALLEST_AMAX)
    scale = amax * (1.0 / LARGEST)
    rounded = numbers * (LARGEST / amax)
    if values.dtype.element_ty == tl.int8:
        # 0 times a number is NaN only if the number is not finite, and such a row has no int8 numbers.
        faults = tl.sum(numbers * 0.0, 0)
        scale += faults
        # fp32 has no fraction bits at 1.5 * 2^23, so adding and subtracting it rounds half to even.
        rounded = tl.where(faults == 0.0, (rounded + 12582912.0) - 12582912.0, 0.0)
    tl.store(values + row * WIDTH + column, rounded.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _scale_sums(  # type: ignore[no-untyped-def]
    sums, row_scales, scales, bias, y, N: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write sums `[T, N]` of int8 products times the scales of their row and output, plus the bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    found = tl.load(sums + row * N + column, mask=inside, other=0).to(tl.float32) * tl.load(row_scales + row)
    found *= tl.load(scales + column, mask=inside, other=0.0)
    if HAS_BIAS:
        found += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + column, found.to(y.dtype.element_ty), mask=inside)
