"""LoRA deltas of many adapters in two launches: `y[t, slice s] += scales[a, s] * (x[t] @ A[a, s].T) @ B[a, s].T`.

Shrink computes `h = x @ A.T` for every chunk of rows that share an adapter, split over K into planes
`[split_k, T, num_slices * rank_padded]` fp32. Expand sums the planes in a fixed order, multiplies with B, scales, and
adds to y. No atomics, so the same input gives the same bits; only written elements of a plane are read, so nothing is
zeroed. Both kernels follow the adapter's page table only up to its own rank, and skip slices with scale 0. The slices
of a group (q, k, v; gate, up) share each launch.

8-bit pages halve the bytes that a decode step reads of its adapters: a row of A and the corresponding row of B share
one scale, which multiplies the sum of the planes.

The grids depend only on shapes: persistent programs process work lists whose length is stored on the device, so a CUDA
graph replays with any mix of adapters, ranks and base rows (see `kernels.gpu.segments`). The lists hold each chunk's
rows, rank, scales and pages. An expand program loads these at once, by its chunk, so one load is between the list's
length and an adapter's first rows of B. A shrink program also loads its tile's chunk before. Later rows' pages are
loaded one tile ahead. Rows of x and y need one more load (`rows`), because they are sorted by adapter.

Source: the two-step gather form of Punica's SGMV (Chen et al., 2023), with S-LoRA's unified rank pages.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from kernels.gpu.dependent_launch import can_launch_early, launch_options
from kernels.gpu.segments import Segments
from kernels.reference import LARGEST, LoraGroup

MAX_SLICES = 3


def segmented_lora(y: Tensor, x: Tensor, group: LoraGroup, segments: Segments) -> None:
    """Add every token's LoRA delta to y in place.

    y `[T, offsets[-1]]`, x `[T, in_features]`: one dtype (fp32, fp16 or bf16), also the pages' dtype unless they have 8
    bits; last dimension contiguous. Base rows of y are neither read nor written. Raises ValueError for unsuitable
    shapes or dtypes.
    """
    early = can_launch_early(x.device)
    expand(y, shrink(x, group, segments, early=early), group, segments, early=early)


def shrink(x: Tensor, group: LoraGroup, segments: Segments, *, early: bool = False) -> Tensor:
    """Return `x @ A.T` of every adapter row, fp32 planes `[split_k, T, num_slices * rank_padded]` in sorted order.

    Separate from `expand` so that it can run in parallel with the base projection on another stream. early: see
    `kernels.gpu.dependent_launch`.
    """
    tile_sizes = segments.tile_sizes
    num_slices, in_features = group.a_pages.shape[1], group.a_pages.shape[3]
    _check(x, "x", in_features, group, segments)
    rank_padded = _rank_padded(segments)
    k_per_split = min(tile_sizes.k_per_split, -(-in_features // tile_sizes.block_k) * tile_sizes.block_k)
    split_k = -(-in_features // k_per_split)
    scales = segments.chunk_scales(group.scales)
    planes = torch.empty((split_k, len(x), num_slices * rank_padded), dtype=torch.float32, device=x.device)
    most = segments.tiles.shape[1] * num_slices * split_k
    programs = min(most, tile_sizes.programs_per_sm * _num_sms(x.device))
    _shrink[(programs,)](
        x,
        group.a_pages,
        scales,
        planes,
        segments.rows,
        segments.chunks,
        segments.tiles,
        segments.counts,
        segments.pages,
        len(x),
        segments.chunks.shape[1],
        segments.tiles.shape[1],
        programs,
        x.stride(0),
        group.a_pages.stride(0),
        scales.stride(0),
        MAX_PAGES=segments.pages.shape[1],
        IN_FEATURES=in_features,
        NUM_SLICES=num_slices,
        PAGE_RANK=segments.page_rank,
        RANK_PADDED=rank_padded,
        SPLIT_K=split_k,
        K_PER_SPLIT=k_per_split,
        BLOCK_M=tile_sizes.block_m,
        BLOCK_R=tile_sizes.block_r,
        BLOCK_K=tile_sizes.block_k,
        EARLY=early,
        num_warps=tile_sizes.num_warps,
        num_stages=tile_sizes.num_stages,
        **launch_options(early),
    )
    return planes


def expand(y: Tensor, planes: Tensor, group: LoraGroup, segments: Segments, *, early: bool = False) -> None:
    """Add `y[rows, slice s] += scale * planes.sum(0) @ B` in place; `planes` is the result of `shrink`.

    early: launch before `shrink` has ended, see `kernels.gpu.dependent_launch`. `shrink` must be the launch before this
    one in the same stream, also early.
    """
    tile_sizes = segments.tile_sizes
    num_slices = len(group.offsets) - 1
    _check(y, "y", group.offsets[-1], group, segments)
    offsets = group.offsets[1:] + (group.offsets[-1],) * (MAX_SLICES - num_slices)
    sizes = (end - start for start, end in zip(group.offsets, group.offsets[1:], strict=False))
    column_tiles = sum(-(-size // tile_sizes.block_n) for size in sizes)
    scales = segments.chunk_scales(group.scales)
    programs = min((segments.chunks.shape[1] - 1) * column_tiles, tile_sizes.programs_per_sm * _num_sms(y.device))
    _expand[(programs,)](
        y,
        group.b_pages,
        scales,
        group.row_scales,
        planes,
        segments.rows,
        segments.chunks,
        segments.counts,
        segments.pages,
        planes.shape[1],
        segments.chunks.shape[1],
        programs,
        y.stride(0),
        group.b_pages.stride(0),
        scales.stride(0),
        0 if group.row_scales is None else group.row_scales.stride(0),
        MAX_PAGES=segments.pages.shape[1],
        OFFSET_1=offsets[0],
        OFFSET_2=offsets[1],
        OFFSET_3=offsets[2],
        NUM_SLICES=num_slices,
        COLUMN_TILES=column_tiles,
        PAGE_RANK=segments.page_rank,
        RANK_PADDED=_rank_padded(segments),
        SPLIT_K=planes.shape[0],
        BLOCK_M=tile_sizes.block_m,
        BLOCK_R=tile_sizes.block_r,
        BLOCK_N=tile_sizes.block_n,
        EARLY=early,
        num_warps=tile_sizes.num_warps,
        num_stages=tile_sizes.num_stages,
        **launch_options(early),
    )


def _check(rows: Tensor, name: str, width: int, group: LoraGroup, segments: Segments) -> None:
    if rows.dim() != 2 or rows.shape != (segments.num_tokens, width) or rows.stride(1) != 1:
        raise ValueError(
            f"{name}: expected [{segments.num_tokens}, {width}] with its last dimension contiguous, "
            f"got {tuple(rows.shape)} with strides {rows.stride()}"
        )
    dtype = group.a_pages.dtype
    if group.b_pages.dtype != dtype or (dtype != rows.dtype and dtype not in LARGEST):
        raise ValueError(f"{name}: {rows.dtype}, but pages are {dtype} and {group.b_pages.dtype}")
    if (group.row_scales is not None) != (dtype in LARGEST):
        raise ValueError(f"row_scales: expected them beside pages of 8 bits and no others, pages are {dtype}")
    if group.a_pages.shape[2] != segments.page_rank:
        raise ValueError(f"a_pages: page rank {group.a_pages.shape[2]}, segments were built for {segments.page_rank}")
    if len(group.offsets) - 1 != group.a_pages.shape[1] or len(group.offsets) - 1 > MAX_SLICES:
        raise ValueError(f"offsets: expected {group.a_pages.shape[1]} slices, at most {MAX_SLICES}: {group.offsets}")
    tensors = (group.a_pages, group.b_pages, group.scales, group.row_scales)
    if not all(tensor is None or tensor[0].is_contiguous() for tensor in tensors):
        raise ValueError("group: expected contiguous pages of a_pages, b_pages and row_scales, and rows of scales")


def _rank_padded(segments: Segments) -> int:
    block_r = segments.tile_sizes.block_r
    return -(-segments.pages.shape[1] * segments.page_rank // block_r) * block_r


@cache
def _num_sms(device: torch.device) -> int:
    """Return the device's number of multiprocessors; 2 in the interpreter, so that programs process several items."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# Lengths that change between steps must not create new variants, because each is compiled while requests wait.
_LENGTHS = ("num_tokens", "chunk_stride", "max_tiles", "programs")


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=("scales",))
def _shrink(  # type: ignore[no-untyped-def]
    x,
    a_pages,
    scales,
    planes,
    rows,
    chunks,
    tiles,
    counts,
    pages,
    num_tokens,
    chunk_stride,
    max_tiles,
    programs,
    x_stride,
    page_stride,
    scale_stride,
    MAX_PAGES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    PAGE_RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    K_PER_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    EVEN_K: tl.constexpr = SPLIT_K * K_PER_SPLIT == IN_FEATURES
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for item in range(tl.program_id(0), tl.load(counts + 1) * (NUM_SLICES * SPLIT_K), programs):
        split = item % SPLIT_K
        s = item // SPLIT_K % NUM_SLICES
        tile = item // (SPLIT_K * NUM_SLICES)
        chunk = tl.load(tiles + tile)
        r = tl.load(tiles + max_tiles + tile) * BLOCK_R + tl.arange(0, BLOCK_R)
        start = tl.load(chunks + chunk_stride + chunk)
        length = tl.load(chunks + chunk_stride + chunk + 1) - start
        rank_live = r < tl.load(chunks + 2 * chunk_stride + chunk)
        # A page beyond the adapter's rank is loaded but not used: the load must not wait for the rank or the scale.
        in_table = r < MAX_PAGES * PAGE_RANK
        page = tl.load(pages + chunk * MAX_PAGES + r // PAGE_RANK, mask=in_table, other=0).to(tl.int64)
        if tl.load(scales + chunk.to(tl.int64) * scale_stride + s) != 0.0:
            row_live = m < length
            row = start + m
            if rows is not None:
                row = tl.load(rows + row, mask=row_live, other=0)
            row = row.to(tl.int64)
            a_row = page * page_stride + (s * PAGE_RANK + r % PAGE_RANK) * IN_FEATURES
            x_at = x + row[:, None] * x_stride + split * K_PER_SPLIT + k[None, :]
            a_at = a_pages + a_row[None, :] + split * K_PER_SPLIT + k[:, None]
            acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            for k0 in range(0, K_PER_SPLIT, BLOCK_K):
                if EVEN_K:
                    x_tile = tl.load(x_at + k0, mask=row_live[:, None], other=0.0)
                    a_tile = tl.load(a_at + k0, mask=rank_live[None, :], other=0.0)
                else:
                    k_live = split * K_PER_SPLIT + k0 + k < IN_FEATURES
                    x_tile = tl.load(x_at + k0, mask=row_live[:, None] & k_live[None, :], other=0.0)
                    a_tile = tl.load(a_at + k0, mask=rank_live[None, :] & k_live[:, None], other=0.0)
                if a_tile.dtype != x_tile.dtype:  # via fp32: a direct conversion to bf16 takes many registers on Hopper
                    a_tile = a_tile.to(tl.float32).to(x_tile.dtype)
                acc = tl.dot(x_tile, a_tile, acc, input_precision="ieee")
            plane_row = (start.to(tl.int64) + m + split * num_tokens) * (NUM_SLICES * RANK_PADDED) + s * RANK_PADDED
            tl.store(planes + plane_row[:, None] + r[None, :], acc, mask=row_live[:, None] & rank_live[None, :])


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=("scales",))
def _expand(  # type: ignore[no-untyped-def]
    y,
    b_pages,
    scales,
    row_scales,
    planes,
    rows,
    chunks,
    counts,
    pages,
    num_tokens,
    chunk_stride,
    programs,
    y_stride,
    page_stride,
    scale_stride,
    row_scale_stride,
    MAX_PAGES: tl.constexpr,
    OFFSET_1: tl.constexpr,
    OFFSET_2: tl.constexpr,
    OFFSET_3: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    PAGE_RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    OUT_FEATURES: tl.constexpr = OFFSET_3
    TILES_1: tl.constexpr = (OFFSET_1 + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = TILES_1 + (OFFSET_2 - OFFSET_1 + BLOCK_N - 1) // BLOCK_N
    m = tl.arange(0, BLOCK_M)
    for item in range(tl.program_id(0), tl.load(counts) * COLUMN_TILES, programs):
        chunk = item // COLUMN_TILES
        tile = item % COLUMN_TILES
        # Column tiles never cross a slice's bound, because each slice has its own scale and its own h.
        s = tl.where(tile >= TILES_2, 2, tl.where(tile >= TILES_1, 1, 0))
        first_tile = tl.where(s == 2, TILES_2, tl.where(s == 1, TILES_1, 0))
        first_column = tl.where(s == 2, OFFSET_2, tl.where(s == 1, OFFSET_1, 0))
        end_column = tl.where(s == 2, OFFSET_3, tl.where(s == 1, OFFSET_2, OFFSET_1))
        start = tl.load(chunks + chunk_stride + chunk)
        length = tl.load(chunks + chunk_stride + chunk + 1) - start
        rank = tl.load(chunks + 2 * chunk_stride + chunk)
        scale = tl.load(scales + chunk.to(tl.int64) * scale_stride + s)
        r = tl.arange(0, BLOCK_R)
        # Loaded beside rank and scale; a page beyond the adapter's rank is not used.
        page = tl.load(pages + chunk * MAX_PAGES + r // PAGE_RANK, mask=r < MAX_PAGES * PAGE_RANK, other=0)
        if EARLY:  # the lists are older than shrink; planes and y may not be
            cuda.gdc_wait()
        if scale != 0.0:
            row_live = m < length
            row = start + m
            if rows is not None:
                row = tl.load(rows + row, mask=row_live, other=0)
            row = row.to(tl.int64)
            n = first_column + (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
            n_live = n < end_column
            y_at = y + row[:, None] * y_stride + n[None, :]
            y_mask = row_live[:, None] & n_live[None, :]
            y_tile = tl.load(y_at, mask=y_mask, other=0.0)
            plane_row = (start.to(tl.int64) + m) * (NUM_SLICES * RANK_PADDED) + s * RANK_PADDED
            plane_stride = num_tokens.to(tl.int64) * (NUM_SLICES * RANK_PADDED)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for r0 in range(0, rank, BLOCK_R):
                at = r0 + r
                rank_live = at < rank
                b_row = page.to(tl.int64) * page_stride + at % PAGE_RANK * OUT_FEATURES
                b_at = b_pages + b_row[:, None] + n[None, :]
                b_tile = tl.load(b_at, mask=rank_live[:, None] & n_live[None, :], other=0.0)
                h_at = planes + plane_row[:, None] + at[None, :]
                h_mask = row_live[:, None] & rank_live[None, :]
                h = tl.load(h_at, mask=h_mask, other=0.0)
                for plane in tl.static_range(1, SPLIT_K):
                    h += tl.load(h_at + plane * plane_stride, mask=h_mask, other=0.0)
                if row_scales is not None:
                    scale_at = row_scales + page.to(tl.int64) * row_scale_stride + s * PAGE_RANK + at % PAGE_RANK
                    # Multiplied by 512 until the end, so that h keeps its precision in fp16, where the scale alone is
                    # subnormal.
                    h *= (tl.load(scale_at, mask=rank_live, other=0.0) * 512.0)[None, :]
                    b_tile = b_tile.to(tl.float16).to(y_tile.dtype)
                acc = tl.dot(h.to(b_tile.dtype), b_tile, acc, input_precision="ieee")
                following = at + BLOCK_R
                page = tl.load(pages + chunk * MAX_PAGES + following // PAGE_RANK, mask=following < rank, other=0)
            if row_scales is not None:
                scale *= 1.0 / 512.0
            y_new = y_tile.to(tl.float32) + scale * acc
            tl.store(y_at, y_new.to(y_tile.dtype), mask=y_mask)
