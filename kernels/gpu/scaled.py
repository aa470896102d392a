"""Products with FP8 weights by torch's scaled product, which multiplies FP8 by FP8 on tensor cores.

Inputs are rounded to FP8 too, with a scale for each row: no row's scale depends on another request's, and a NaN or an
infinity stays in its row. Semantics: `kernels.reference.linear` with rounded inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import LARGEST, SMALLEST_AMAX
from kernels.weights import FP8, LinearWeights

# First compute capability whose tensor cores multiply FP8.
CAPABILITY = (8, 9)
# The scaled product requires sizes that are multiples of this.
SIZE = 16
# Elements of a row for each warp that rounds it.
WARP_ELEMENTS = 2048


def can_multiply(x: Tensor, weights: LinearWeights) -> bool:
    """Return whether the scaled product serves these weights, on a device with CAPABILITY.

    They have a scale for each output, and x is bfloat16: in other dtypes inputs are not rounded.
    """
    is_by_output = weights.scheme.kind == "fp8" and not weights.scheme.group
    has_fitting_size = weights.in_features % SIZE == 0 and weights.out_features % SIZE == 0
    return is_by_output and has_fitting_size and x.dtype == torch.bfloat16


def linear(x: Tensor, weights: LinearWeights) -> Tensor:
    """Return `x W^T + bias`, `[T, out]` in x's dtype, with sums in fp32. x `[T, in]`, contiguous rows; see
    `can_multiply`.
    """
    values, scales = round_rows(x)
    # torch.nn.functional.scaled_mm calls the same kernels, but torch 2.9 lacks it.
    return torch._scaled_mm(
        values, weights.tensors["values"].t(), scales[:, None], weights.tensors["scales"].t(), weights.bias,
        out_dtype=x.dtype,
    )  # fmt: skip


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x `[T, width]` in FP8 and its scales `[T]` fp32, as `kernels.reference.quantize_rows` does.

    Raises ValueError for rows that are not contiguous.
    """
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x: expected [T, in] with contiguous rows, got {tuple(x.shape)}")
    width = x.shape[1]
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        block = triton.next_power_of_2(width)
        _round_rows[(len(x),)](
            x, values, scales, x.stride(0), WIDTH=width, BLOCK=block, LARGEST=LARGEST[FP8],
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
    rounded = (numbers * (LARGEST / amax)).to(values.dtype.element_ty)
    tl.store(values + row * WIDTH + column, rounded, mask=inside)
    tl.store(scales + row, amax * (1.0 / LARGEST))
