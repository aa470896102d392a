"""Element-wise ops of the decoder in Triton, one launch each: norms, rotary embedding with the cache write, gates.

Same semantics as their namesakes in `kernels.reference`: sums and products in fp32, results rounded where the reference
rounds. All are memory-bound; rows are read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import LARGEST, SMALLEST_AMAX, HeadNorms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension of x, of any shape; contiguous result.

    x `[T, width]` or `[T, heads, width]` may be a view whose last dimension is contiguous (heads of a qkv row).
    """
    rows = _as_rows(x, "x")
    _check_weight(weight, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        # x is passed as the residual too, which FUSE_ADD=False neither reads nor writes.
        _launch_norm(rows, rows, weight, out, eps, False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `residual += x` in place, rounded to its dtype, then return `rms_norm(residual)`.

    x and residual `[T, width]`.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(f"residual: expected {tuple(x.shape)} {x.dtype}, got {tuple(residual.shape)} {residual.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x: expected [T, width], got {tuple(x.shape)}")
    _check_weight(weight, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _launch_norm(_as_rows(x, "x"), _as_rows(residual, "residual"), weight, out, eps, True)
    return out


def _launch_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, fuse_add: bool) -> None:
    num_tokens, heads, width = x.shape
    block = triton.next_power_of_2(width)
    # A program processes at least 1,024 elements, so that norms of single heads use full warp loads.
    rows_per_program = max(1, 1024 // block)
    _rms_norm[(triton.cdiv(num_tokens * heads, rows_per_program),)](
        x,
        residual,
        weight,
        out,
        num_tokens * heads,
        x.stride(0),
        x.stride(1),
        residual.stride(0),
        eps,
        HEADS=heads,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows_per_program,
        FUSE_ADD=fuse_add,
        num_warps=min(8, max(1, block * rows_per_program // 512)),
    )


def rope_and_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate q and k of qkv `[T, (num_heads + 2 * num_kv_heads) * D]`, after their norms if there are any, store k and
    v, return q `[T, num_heads, D]`.

    Tokens with a negative slot (padding of a graph's bucket) store nothing. 8-bit caches have scales
    `[num_blocks, num_kv_heads, block_size]` fp32, which are written too (`kernels.reference.quantize_rows`).
    """
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv: expected contiguous rows of heads of {head_dim}, {num_kv_heads} of them keys and as many values, "
            f"got {tuple(qkv.shape)} with strides {qkv.stride()}"
        )
    if k_cache.shape != v_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache: expected contiguous caches of one shape")
    check_kv_scales(k_cache, v_cache, k_scales, v_scales)
    if cos_sin.shape[1] != head_dim or not cos_sin.is_contiguous() or head_dim % 2:
        raise ValueError(f"cos_sin: expected contiguous [max_positions, {head_dim}], got {tuple(cos_sin.shape)}")
    for weight in norms[:2] if norms is not None else ():
        _check_weight(weight, qkv[:, :head_dim])
    q = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    all_heads, block_heads = num_heads + 2 * num_kv_heads, 8
    if len(qkv):
        _rope_and_write_kv[(len(qkv), triton.cdiv(all_heads, block_heads))](
            qkv,
            positions,
            cos_sin,
            k_cache,
            v_cache,
            slot_mapping,
            q,
            k_scales,
            v_scales,
            None if norms is None else norms.q,
            None if norms is None else norms.k,
            qkv.stride(0),
            0.0 if norms is None else norms.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2),
            BLOCK_SIZE=block_size,
            BLOCK_HEADS=block_heads,
            LARGEST=LARGEST.get(k_cache.dtype, 0.0),
            SMALLEST_AMAX=SMALLEST_AMAX,
            num_warps=2,
        )
    return q


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[T, intermediate]`, of gate_up `[T, 2 * intermediate]`."""
    return _activate_and_mul(gate_up, False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, `[T, intermediate]`, of gate_up `[T, 2 * intermediate]`; gelu in its tanh form."""
    return _activate_and_mul(gate_up, True)


def _activate_and_mul(gate_up: Tensor, gelu: bool) -> Tensor:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up: expected contiguous rows of even width, got {tuple(gate_up.shape)}")
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    if out.numel():
        _gate_and_mul[(num_tokens, triton.cdiv(width, block))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, GELU=gelu, num_warps=4
        )
    return out


def check_kv_scales(k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None, v_scales: Tensor | None) -> None:
    """Raise ValueError unless 8-bit caches have scales of their shape, and other caches have none."""
    for name, cache, scales in (("k_scales", k_cache, k_scales), ("v_scales", v_cache, v_scales)):
        if (scales is not None) != (cache.dtype in LARGEST):
            raise ValueError(f"{name}: expected {'scales' if scales is None else 'none'} for a cache of {cache.dtype}")
        if scales is not None and (
            scales.shape != cache.shape[:3] or scales.dtype != torch.float32 or not scales.is_contiguous()
        ):
            raise ValueError(
                f"{name}: expected contiguous float32 {tuple(cache.shape[:3])}, "
                f"got {scales.dtype} {tuple(scales.shape)}"
            )


def _as_rows(x: Tensor, name: str) -> Tensor:
    """Return x as `[T, heads, width]`, copied only if its strides require it (more than three dimensions)."""
    if x.stride(-1) != 1:
        raise ValueError(f"{name}: expected its last dimension contiguous, got strides {x.stride()}")
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


def _check_weight(weight: Tensor, x: Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.is_contiguous() or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"weight: expected [{x.shape[-1]}] of {x.dtype} or float32, got {tuple(weight.shape)} of {weight.dtype}"
        )


@triton.jit(do_not_specialize=("num_rows",))
def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    num_rows,
    x_token_stride,
    x_head_stride,
    residual_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FUSE_ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    x_at = x + (row // HEADS * x_token_stride + row % HEADS * x_head_stride)[:, None] + column[None, :]
    values = tl.load(x_at, mask=mask, other=0.0)
    if FUSE_ADD:
        residual_at = residual + (row * residual_stride)[:, None] + column[None, :]
        # The sum is rounded before the norm, because the next layer adds to the rounded sum.
        total = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32) + values.to(tl.float32)
        values = total.to(values.dtype)
        tl.store(residual_at, values, mask=mask)
    h = values.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 1) / WIDTH + eps)[:, None]
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    if w.dtype == values.dtype:
        h = h.to(values.dtype).to(tl.float32)
    h = h * w.to(tl.float32)[None, :]
    tl.store(out + (row * WIDTH)[:, None] + column[None, :], h.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=("positions", "slot_mapping"))
def _rope_and_write_kv(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    slot_mapping,
    q,
    k_scales,
    v_scales,
    q_norm,
    k_norm,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, HALF_PADDED)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64) + 0 * head  # one per head, for the masks
    in_head = d < HALF
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_head[None, :]
    at = qkv + token * qkv_stride + head[:, None] * HEAD_DIM + d[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + HALF, mask=mask, other=0.0)
    if q_norm is not None:
        inverse = tl.sum(first.to(tl.float32) * first.to(tl.float32) + second.to(tl.float32) * second.to(tl.float32), 1)
        inverse = tl.rsqrt(inverse / HEAD_DIM + eps)
        first = _norm_half(first, inverse, head, q_norm + d, k_norm + d, in_head, NUM_HEADS, NUM_KV_HEADS)
        second = _norm_half(
            second, inverse, head, q_norm + HALF + d, k_norm + HALF + d, in_head, NUM_HEADS, NUM_KV_HEADS
        )
    cos = tl.load(cos_sin + position * HEAD_DIM + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + HALF + d, mask=in_head, other=0.0).to(tl.float32)[None, :]
    rotated_first = (first.to(tl.float32) * cos - second.to(tl.float32) * sin).to(first.dtype)
    rotated_second = (second.to(tl.float32) * cos + first.to(tl.float32) * sin).to(first.dtype)

    q_at = q + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q_mask = mask & (head < NUM_HEADS)[:, None]
    tl.store(q_at, rotated_first, mask=q_mask)
    tl.store(q_at + HALF, rotated_second, mask=q_mask)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    kv_row = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    kv_at = kv_row[:, None] * HEAD_DIM + d[None, :]
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS) & (slot >= 0)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (slot >= 0)
    k_first, k_second, v_first, v_second = rotated_first, rotated_second, first, second
    if LARGEST > 0:
        k_first, k_second, k_scale = _quantize(rotated_first, rotated_second, LARGEST, SMALLEST_AMAX, k_cache)
        v_first, v_second, v_scale = _quantize(first, second, LARGEST, SMALLEST_AMAX, v_cache)
        tl.store(k_scales + kv_row, k_scale, mask=is_key)
        tl.store(v_scales + kv_row, v_scale, mask=is_value)
    k_mask = mask & is_key[:, None]
    v_mask = mask & is_value[:, None]
    tl.store(k_cache + kv_at, k_first.to(k_cache.dtype.element_ty), mask=k_mask)
    tl.store(k_cache + kv_at + HALF, k_second.to(k_cache.dtype.element_ty), mask=k_mask)
    tl.store(v_cache + kv_at, v_first.to(v_cache.dtype.element_ty), mask=v_mask)
    tl.store(v_cache + kv_at + HALF, v_second.to(v_cache.dtype.element_ty), mask=v_mask)


@triton.jit
def _norm_half(  # type: ignore[no-untyped-def]
    half, inverse, head, q_weight, k_weight, in_head, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr
):
    """Return half of each head's row times `inverse` and the weight of q or k; values stay as they are."""
    h = half.to(tl.float32) * inverse[:, None]
    q_tile = tl.load(q_weight, mask=in_head, other=0.0)
    k_tile = tl.load(k_weight, mask=in_head, other=0.0)
    if q_tile.dtype == half.dtype:
        h = h.to(half.dtype).to(tl.float32)
    h *= tl.where((head < NUM_HEADS)[:, None], q_tile.to(tl.float32)[None, :], k_tile.to(tl.float32)[None, :])
    return tl.where((head < NUM_HEADS + NUM_KV_HEADS)[:, None], h.to(half.dtype), half)


@triton.jit
def _quantize(first, second, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr, cache):  # type: ignore[no-untyped-def]
    """Return both halves of the rows, scaled to the range of the cache's dtype, and the rows' scales.

    Values for int8 are already rounded.
    """
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    amax = tl.maximum(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1), SMALLEST_AMAX)
    first *= (LARGEST / amax)[:, None]
    second *= (LARGEST / amax)[:, None]
    if cache.dtype.element_ty == tl.int8:
        # fp32 has no fraction bits at 1.5 * 2^23, so adding and subtracting it rounds half to even.
        first = (first + 12582912.0) - 12582912.0
        second = (second + 12582912.0) - 12582912.0
    return first, second, amax * (1.0 / LARGEST)


@triton.jit
def _gate_and_mul(  # type: ignore[no-untyped-def]
    gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up + token * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    exponent = gate
    if GELU:  # 0.5 * (1 + tanh(y)) is the sigmoid of 2y, with y = sqrt(2 / pi) * (gate + 0.044715 * gate^3)
        exponent = tl.maximum(gate * (1.0 + 0.044715 * gate * gate) * 1.5957691216057308, -80.0)  # e^80 is finite
    result = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(out + token * WIDTH + column, result.to(out.dtype.element_ty), mask=mask)
