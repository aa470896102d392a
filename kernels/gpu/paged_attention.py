"""Causal attention over a paged cache for prefill, decode and mixed batches.

`out[t, h] = softmax(scale * q[t, h] @ K[:p + 1].T) @ V[:p + 1]`, where p is the position of token t, and K and V belong
to t's request and key-value head `h // group`. Layouts and arguments are those of `kernels.reference.paged_attention`.

A tile's rows are query tokens times the query heads that share a key-value head, so GQA reads each key once per tile.
Keys are processed with the online softmax of FlashAttention-2 (Dao, 2023): first without a mask, then the diagonal.
Each program of a persistent grid processes an equal share of the step's work (`kernels.gpu.attention_work`). A tile
that several programs share is merged by a second kernel, by log-sum-exp in a fixed order, so the same input gives the
same bits. Grids depend only on the device and on bounds known to the host. A CUDA graph can therefore contain the
launches, and replays with any lengths.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from kernels.gpu.attention_work import WorkList, list_work
from kernels.gpu.dependent_launch import can_launch_early, launch_options
from kernels.gpu.fused import check_kv_scales
from kernels.reference import LARGEST

LOG2E = 1.4426950408889634  # the softmax uses exp2


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    work: list[WorkList] | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Compute `kernels.reference.paged_attention`; return `[T, num_heads, D]`.

    `work` avoids building the lists again for each layer; without it the queries' lengths are read back from the device
    (a sync). 8-bit caches (float8_e4m3fn or int8) need their scales and are widened to q's dtype in the kernel. Rows of
    q that no request owns (padding) are not written. q may be a view whose last dimension is contiguous. Raises
    ValueError for unsuitable shapes, dtypes or layouts.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, cache_dim = k_cache.shape
    fits = k_cache.dtype == v_cache.dtype and (k_cache.dtype == q.dtype or k_cache.dtype in LARGEST)
    if k_cache.shape != v_cache.shape or cache_dim != head_dim or not fits:
        raise ValueError(
            f"k_cache: expected q's head size, its dtype or 8 bits, v_cache's shape; got q {tuple(q.shape)} {q.dtype}, "
            f"k_cache {tuple(k_cache.shape)} {k_cache.dtype}, v_cache {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    if q.stride(2) != 1 or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("q: expected its last dimension contiguous, and contiguous caches")
    check_kv_scales(k_cache, v_cache, k_scales, v_scales)
    if block_size & (block_size - 1):
        raise ValueError(f"k_cache: expected a power of two as block size, got {block_size}")
    if block_tables.stride(1) != 1:
        raise ValueError("block_tables: expected contiguous rows")
    if work is None:
        work = list_work(
            query_start,
            context_lens,
            num_heads,
            num_kv_heads,
            num_tokens=num_tokens,
            max_query_len=int((query_start[1:] - query_start[:-1]).max()) if len(context_lens) else 0,
            sliding_window=sliding_window,
        )
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    head_padded = max(16, triton.next_power_of_2(head_dim))
    for each in work if num_tokens else ():
        tile, group = each.tile, num_heads // num_kv_heads
        early = can_launch_early(q.device)
        pieces = torch.empty((each.programs, 2, tile.block_m, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(pieces.shape[:-1], dtype=torch.float32, device=q.device)
        cut = torch.empty((each.programs, 2), dtype=torch.int32, device=q.device)
        shared = {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "HEAD_PADDED": head_padded,
            "BLOCK_Q": each.block_q,
            "BLOCK_M": tile.block_m,
        }
        _attend[(each.programs,)](
            q,
            k_cache,
            v_cache,
            out,
            pieces,
            lse,
            cut,
            each.tiles,
            each.starts,
            block_tables,
            query_start,
            context_lens,
            k_scales,
            v_scales,
            each.tiles.shape[1],
            block_tables.stride(0),
            q.stride(0),
            q.stride(1),
            scale * LOG2E if not softcap else scale * 2 * LOG2E / softcap,
            each.programs,
            SOFTCAP=softcap * LOG2E,
            BLOCK_SIZE=block_size,
            BLOCK_N=tile.block_n if head_padded * q.element_size() <= 256 else tile.block_n // 2,
            CHUNK=tile.chunk,
            WINDOW=sliding_window,
            **shared,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        _merge[(each.programs, each.block_q * group)](
            out,
            pieces,
            lse,
            cut,
            each.tiles,
            query_start,
            each.tiles.shape[1],
            each.programs,
            **shared,
            EARLY=early,
            num_warps=2,
            **launch_options(early),
        )
    return out


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    acc,
    m,
    weight,
    q_tile,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    begin,
    end,
    kv_head,
    position,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add keys begin..end to the online softmax (acc, m, weight). Not MASKED: complete tiles that every row sees.

    Scores are exponents of 2. With a soft cap, 2^scores is e^2y before the cap is applied, y = score / softcap, because
    tanh(y) = 1 - 2 / (e^2y + 1). SOFTCAP includes the factor log2(e).
    """
    d = tl.arange(0, HEAD_PADDED)
    for key0 in range(begin, end, BLOCK_N):
        key = key0 + tl.arange(0, BLOCK_N)
        # Rows beyond the context are unwritten, perhaps NaN: 0 * NaN would reach the sum through V.
        live = key < end
        if MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        cache_row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        k_at = k_cache + cache_row[None, :] * HEAD_DIM + d[:, None]
        v_at = v_cache + cache_row[:, None] * HEAD_DIM + d[None, :]
        if MASKED or HEAD_DIM != HEAD_PADDED:
            k_tile = tl.load(k_at, mask=live[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            v_tile = tl.load(v_at, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        else:
            k_tile = tl.load(k_at)
            v_tile = tl.load(v_at)
        if k_scales is not None:
            # 8-bit values are exact in fp16; a direct conversion to bf16 needs many registers on Hopper. The scales
            # apply to columns, outside of both products.
            k_tile = k_tile.to(tl.float16)
            v_tile = v_tile.to(tl.float16)
        scores = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision="ieee") * scale_log2
        if k_scales is not None:
            scores *= tl.load(k_scales + cache_row, mask=live, other=0.0)[None, :]
        if SOFTCAP > 0:
            scores = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(scores) + 1.0)
        if MASKED:
            visible = live[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        weight = weight * shrink + tl.sum(p, 1)
        if v_scales is not None:
            p *= tl.load(v_scales + cache_row, mask=live, other=0.0)[None, :]
        acc = tl.dot(p.to(q_tile.dtype), v_tile.to(q_tile.dtype), acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return acc, m, weight


# Lengths that change between steps must not create new variants, because each is compiled while requests wait. The same
# holds for the position of a step's tables in their upload buffer.
_LENGTHS = ("tiles_stride", "table_stride", "programs")
_TABLES = ("block_tables", "query_start", "context_lens")


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_TABLES)
def _attend(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    out,
    pieces,
    lse,
    cut,
    tiles,
    starts,
    block_tables,
    query_start,
    context_lens,
    k_scales,
    v_scales,
    tiles_stride,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale_log2,
    programs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Process the units from `program * share` on: the rest of a tile, whole tiles, the beginning of a tile.

    Whole tiles go to `out`, the rest of a tile to `pieces[program, 0]`, and a beginning to `pieces[program, 1]`.
    `cut[program]` is the tile and head of that beginning, or -1.
    """
    program = tl.program_id(0)
    total = tl.load(tiles + 3 * tiles_stride - 1) * NUM_KV_HEADS
    share = (total + programs - 1) // programs
    unit = program * share
    end_unit = tl.minimum(unit + share, total)
    tile = tl.load(starts + program)
    tl.store(cut + 2 * program, -1)
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_PADDED)
    while unit < end_unit:
        base = tl.load(tiles + 2 * tiles_stride + tile)
        num_chunks = tl.load(tiles + 2 * tiles_stride + tile + 1) - base
        request = tl.load(tiles + tile)
        first = tl.load(tiles + tiles_stride + tile)
        kv_head = (unit - base * NUM_KV_HEADS) // num_chunks
        first_chunk = (unit - base * NUM_KV_HEADS) % num_chunks
        end_chunk = tl.minimum(num_chunks, first_chunk + end_unit - unit)
        query_at = tl.load(query_start + request)
        query_len = tl.load(query_start + request + 1) - query_at
        context_len = tl.load(context_lens + request)
        first_position = context_len - query_len + first
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(first_position - WINDOW + 1, 0)
        end = tl.minimum(begin + end_chunk * CHUNK, tl.minimum(first_position + BLOCK_Q, context_len))
        begin += first_chunk * CHUNK

        token = first + row // GROUP
        head = kv_head * GROUP + row % GROUP
        live = (row < BLOCK_Q * GROUP) & (token < query_len)
        position = context_len - query_len + token
        mask = live[:, None] & (d < HEAD_DIM)[None, :]
        q_at = (query_at + token).to(tl.int64) * q_token_stride + head * q_head_stride
        q_tile = tl.load(q + q_at[:, None] + d[None, :], mask=mask, other=0.0)

        acc = tl.zeros((BLOCK_M, HEAD_PADDED), dtype=tl.float32)
        # Finite, so that a row that has seen no key computes exp2(0), not exp2(nan).
        m = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32)
        weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
        table = block_tables + request.to(tl.int64) * table_stride
        diagonal = begin
        if WINDOW == 0:
            seen_by_all = tl.maximum(tl.minimum(first_position + 1, end) - begin, 0)
            diagonal = begin + seen_by_all // BLOCK_N * BLOCK_N
            acc, m, weight = _walk(
                acc, m, weight, q_tile, k_cache, v_cache, k_scales, v_scales, table, begin, diagonal, kv_head,
                position, scale_log2, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP,
                False,
            )  # fmt: skip
        acc, m, weight = _walk(
            acc, m, weight, q_tile, k_cache, v_cache, k_scales, v_scales, table, diagonal, end, kv_head,
            position, scale_log2, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, BLOCK_N, WINDOW, SOFTCAP, True,
        )  # fmt: skip
        # A row that has seen no key of this piece has weight 0 in the merge.
        acc = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]
        begins = first_chunk == 0
        ends = end_chunk == num_chunks
        if begins & ends:
            out_at = ((query_at + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
            tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)
        else:
            piece = (2 * program + begins.to(tl.int32)).to(tl.int64) * BLOCK_M + row
            tl.store(pieces + piece[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
            tl.store(lse + piece, tl.where(weight > 0.0, m + tl.log2(weight), float("-inf")), mask=live)
            if begins:
                tl.store(cut + 2 * program, tile)
                tl.store(cut + 2 * program + 1, kv_head)
        unit += end_chunk - first_chunk
        tile += ((kv_head == NUM_KV_HEADS - 1) & ends).to(tl.int32)


@triton.jit(do_not_specialize=("tiles_stride", "programs"), do_not_specialize_on_alignment=("query_start",))
def _merge(  # type: ignore[no-untyped-def]
    out,
    pieces,
    lse,
    cut,
    tiles,
    query_start,
    tiles_stride,
    programs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge a row of the tile that a program has begun and later ones have continued, in their order."""
    PIECES: tl.constexpr = 16
    if EARLY:
        cuda.gdc_wait()
    program = tl.program_id(0)
    row = tl.program_id(1)
    tile = tl.load(cut + 2 * program)
    if tile >= 0:
        kv_head = tl.load(cut + 2 * program + 1)
        base = tl.load(tiles + 2 * tiles_stride + tile)
        num_chunks = tl.load(tiles + 2 * tiles_stride + tile + 1) - base
        total = tl.load(tiles + 3 * tiles_stride - 1) * NUM_KV_HEADS
        share = (total + programs - 1) // programs
        last = (base * NUM_KV_HEADS + (kv_head + 1) * num_chunks - 1) // share
        request = tl.load(tiles + tile)
        token = tl.load(tiles + tiles_stride + tile) + row // GROUP
        query_at = tl.load(query_start + request)
        if token < tl.load(query_start + request + 1) - query_at:
            d = tl.arange(0, HEAD_PADDED)
            m = tl.full((), -1.0e30, dtype=tl.float32)
            weight = tl.zeros((), dtype=tl.float32)
            acc = tl.zeros((HEAD_PADDED,), dtype=tl.float32)
            for first in range(program, last + 1, PIECES):
                p = first + tl.arange(0, PIECES)
                live = p <= last
                piece = (2 * p + (p == program).to(tl.int32)).to(tl.int64) * BLOCK_M + row
                exponent = tl.load(lse + piece, mask=live, other=float("-inf"))
                m_new = tl.maximum(m, tl.max(exponent, 0))
                share_of = tl.exp2(exponent - m_new)
                mask = live[:, None] & (d < HEAD_DIM)[None, :]
                values = tl.load(pieces + piece[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
                shrink = tl.exp2(m - m_new)
                acc = acc * shrink + tl.sum(values * share_of[:, None], 0)
                weight = weight * shrink + tl.sum(share_of, 0)
                m = m_new
            head = kv_head * GROUP + row % GROUP
            out_at = ((query_at + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + d
            tl.store(out + out_at, (acc / weight).to(out.dtype.element_ty), mask=d < HEAD_DIM)
