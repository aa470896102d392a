"""Causal attention over a paged cache in one varlen kernel, for prefill, decode and mixed batches.

`out[t, h] = softmax(scale * q[t, h] @ K[:p + 1].T) @ V[:p + 1]`, where p is the position of token t, and K and V belong
to t's request and key-value head `h // group`. Layouts and arguments are those of `kernels.reference.paged_attention`.

A tile's rows are query tokens times the query heads that share a key-value head, so GQA reads each key once per tile.
Keys are processed with the online softmax of FlashAttention-2 (Dao, 2023): first without a mask, then the diagonal.
Long contexts of single-token queries are divided into splits (Flash-Decoding); a second kernel combines their partial
results in a fixed order, so the same input gives the same bits. Grids and the number of splits depend only on bounds
known to the host; the device decides which part of them is in use. A CUDA graph can therefore contain the launches, and
needs no new work list if every query is one token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_tiles import MAX_SPLITS, AttentionMetadata, build_attention_metadata
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
    metadata: AttentionMetadata | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Compute `kernels.reference.paged_attention`; return `[T, num_heads, D]`.

    `metadata` avoids rebuilding it for each layer; without it the lengths are read back from the device (a sync). 8-bit
    caches (float8_e4m3fn or int8) need their scales and are widened to q's dtype in the kernel. Rows of q that no
    request owns (padding) are not written. q may be a view whose last dimension is contiguous. Raises ValueError for
    unsuitable shapes, dtypes or layouts.
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
    if metadata is None:
        metadata = build_attention_metadata(
            query_start,
            num_heads,
            num_kv_heads,
            num_tokens=num_tokens,
            max_query_len=int((query_start[1:] - query_start[:-1]).max()) if len(context_lens) else 0,
            max_context_len=int(context_lens.max()) if len(context_lens) else 0,
        )
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if metadata.num_tiles == 0:
        return out
    splits, tile = metadata.num_splits, metadata.tile
    partial = torch.empty(
        (len(context_lens), num_heads, splits, head_dim) if splits > 1 else 0, dtype=torch.float32, device=q.device
    )
    lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device)
    head_padded = max(16, triton.next_power_of_2(head_dim))
    shared = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_PADDED": head_padded,
        "MIN_SPLIT": tile.min_split,
        "WINDOW": sliding_window,
    }
    _attend[(metadata.num_tiles, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        lse,
        metadata.tiles,
        metadata.tiles_in_use,
        block_tables,
        query_start,
        context_lens,
        k_scales,
        v_scales,
        metadata.num_tiles,
        block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        scale * LOG2E if not softcap else scale * 2 * LOG2E / softcap,
        splits,
        SOFTCAP=softcap * LOG2E,
        BLOCK_SIZE=block_size,
        BLOCK_Q=metadata.block_q,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n if head_padded * q.element_size() <= 256 else tile.block_n // 2,
        **shared,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _combine[(len(context_lens), num_heads)](
            out, partial, lse, query_start, context_lens, splits, **shared, MOST_SPLITS=MAX_SPLITS, num_warps=4
        )
    return out


@triton.jit
def _keys_per_split(num_keys, query_len, num_splits, MIN_SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of keys per split, chosen so that only the last split ends within a tile.

    A request with more than one query has a single split.
    """
    share = tl.maximum((num_keys + num_splits * 64 - 1) // (num_splits * 64) * 64, MIN_SPLIT)
    return tl.where(query_len == 1, share, num_keys)


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
_TABLES = ("block_tables", "query_start", "context_lens")


@triton.jit(do_not_specialize=("num_tiles", "table_stride", "num_splits"), do_not_specialize_on_alignment=_TABLES)
def _attend(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    out,
    partial,
    lse,
    tiles,
    tiles_in_use,
    block_tables,
    query_start,
    context_lens,
    k_scales,
    v_scales,
    num_tiles,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale_log2,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = tile
    first = 0
    in_use = num_tiles
    if tiles is not None:
        in_use = tl.load(tiles_in_use)
        request = tl.load(tiles + tile, mask=tile < in_use, other=0)
        first = tl.load(tiles + num_tiles + tile, mask=tile < in_use, other=0)
    if tile < in_use:
        query_at = tl.load(query_start + request)
        query_len = tl.load(query_start + request + 1) - query_at
        context_len = tl.load(context_lens + request)
        first_position = context_len - query_len + first
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(first_position - WINDOW + 1, 0)
        stop = tl.minimum(first_position + BLOCK_Q, context_len)
        per_split = _keys_per_split(stop - begin, query_len, num_splits, MIN_SPLIT)
        whole = per_split >= stop - begin
        begin += split * per_split
        end = tl.minimum(begin + per_split, tl.where(query_len > 0, stop, 0))
        if begin < end:
            row = tl.arange(0, BLOCK_M)
            token = first + row // GROUP
            head = kv_head * GROUP + row % GROUP
            live = (row < BLOCK_Q * GROUP) & (token < query_len)
            position = context_len - query_len + token
            d = tl.arange(0, HEAD_PADDED)
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
            total = tl.where(weight > 0.0, weight, 1.0)
            acc = acc / total[:, None]
            if whole:
                out_at = ((query_at + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
                tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)
            else:
                part = (request.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
                tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
                tl.store(lse + part, m + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=("num_splits",), do_not_specialize_on_alignment=_TABLES[1:])
def _combine(  # type: ignore[no-untyped-def]
    out,
    partial,
    lse,
    query_start,
    context_lens,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """Combine the splits of one request and head by their log-sum-exp, in a fixed order."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    query_at = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - query_at
    num_keys = tl.load(context_lens + request)
    if WINDOW > 0:
        num_keys = tl.minimum(num_keys, WINDOW)
    per_split = _keys_per_split(num_keys, query_len, num_splits, MIN_SPLIT)
    if (query_len == 1) & (per_split < num_keys):
        split = tl.arange(0, MOST_SPLITS)
        d = tl.arange(0, HEAD_PADDED)
        live = split * per_split < num_keys
        part = (request.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
        weight = tl.load(lse + part, mask=live, other=float("-inf"))
        weight = tl.exp2(weight - tl.max(weight, 0))
        mask = live[:, None] & (d < HEAD_DIM)[None, :]
        values = tl.load(partial + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        result = tl.sum(values * weight[:, None], 0) / tl.sum(weight, 0)
        out_at = (query_at.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + d
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
