"""Division of a step's attention into equal shares of work, built on the device.

A tile is a few query tokens of one request. The keys that it reads are cut into chunks of a fixed size, and a unit of
work is one chunk of one tile for one key-value head. All units of a step, in the order (tile, head, chunk), are divided
into contiguous shares of equal length, one for each program of a persistent grid, as in LeanAttention (Sanovar et al.,
2024). A request's context therefore costs its own bytes, whatever the rest of the batch is, and the number of partial
results depends on the grid alone: each share cuts at most two tiles.

Requests with few queries (decodes) and requests with many (prompts) have different tile sizes, so a mixed step has two
lists and two launches.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of paged attention.

    block_m: rows of a tile, query tokens times the heads of a group; larger for wider groups. block_n: keys per
    iteration, half as many if a head's row exceeds 256 bytes. chunk: keys of a unit of work. programs_per_sm:
    persistent programs for each multiprocessor, as many as fit at once.
    """

    block_m: int
    block_n: int
    chunk: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# Not measured; benchmarks/gpu/plans.py has not run on a GPU yet. Decode: the smallest tile that tl.dot accepts, and
# chunks of two iterations, so that one request of 512 tokens keeps 32 programs busy. Prefill: 128 rows, tensor-core
# work for two warpgroups.
DECODE = Tile(16, 64, 128, num_warps=4, num_stages=3, programs_per_sm=3)
PREFILL = Tile(128, 64, 256, num_warps=8, num_stages=3, programs_per_sm=1)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Tiles of a step with one size, the same for every layer with the same window. All tensors int32.

    tile, block_q: sizes, and query tokens of a tile. programs: number of programs in the grid. tiles: `[3, capacity +
    1]`, request, first query token within the request, and number of the chunks of all tiles before; the last row
    continues with the total after the tiles in use. starts: `[programs]`, the tile in which each program begins.
    """

    tile: Tile
    block_q: int
    programs: int
    tiles: Tensor
    starts: Tensor


def list_work(
    query_start: Tensor,
    context_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    num_tokens: int,
    max_query_len: int,
    sliding_window: int = 0,
    decode: Tile = DECODE,
    prefill: Tile = PREFILL,
) -> list[WorkList]:
    """Divide the step's attention on the device, without a host sync: decodes, then prompts if there may be any.

    `max_query_len` is an upper bound. The lists' sizes depend only on shapes and bounds, so a CUDA graph can contain
    the build and replays with any lengths. Raises ValueError for heads that do not divide.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads: expected a multiple of {num_kv_heads} key-value heads, got {num_heads}")
    group = num_heads // num_kv_heads
    num_requests = query_start.shape[0] - 1
    small = _for_group(decode, group)
    few = small.block_m // group
    # (tile sizes, query tokens of a tile, least query tokens of a request, capacity of the list)
    lists = [(small, few, 1, min(num_requests, num_tokens))]
    if max_query_len > few:
        large = _for_group(prefill, group)
        block_q = large.block_m // group
        prompts = min(num_requests, num_tokens // (few + 1))
        lists.append((large, block_q, few + 1, prompts + max(num_tokens - prompts, 0) // block_q))
    found = []
    block_b = 128 if num_requests <= 128 else max(1024, triton.next_power_of_2(num_requests))
    for tile, block_q, least, capacity in lists:
        programs = tile.programs_per_sm * _num_sms(query_start.device)
        tiles = torch.empty((3, capacity + 1), dtype=torch.int32, device=query_start.device)
        starts = torch.empty(programs, dtype=torch.int32, device=query_start.device)
        _list_work[(1,)](
            query_start,
            context_lens,
            tiles,
            starts,
            num_requests,
            capacity,
            capacity.bit_length(),
            programs,
            LEAST=least,
            MOST=few if least == 1 else 2**30,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_Q=block_q,
            CHUNK=tile.chunk,
            WINDOW=sliding_window,
            BLOCK_B=block_b,
            BLOCK_I=max(1, 8192 // block_b),
            BLOCK_P=256,
            num_warps=4,
        )
        found.append(WorkList(tile, block_q, programs, tiles, starts))
    return found


def _for_group(tile: Tile, group: int) -> Tile:
    return replace(tile, block_m=max(tile.block_m, triton.next_power_of_2(group)))


@cache
def _num_sms(device: torch.device) -> int:
    """Return the device's number of multiprocessors; 2 in the interpreter, so that it also tests cuts."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# Lengths that change between steps must not create new variants, because each is compiled while requests wait. The same
# holds for the position of a step's tables in their upload buffer.
@triton.jit(
    do_not_specialize=("num_requests", "capacity", "search_steps", "programs"),
    do_not_specialize_on_alignment=("query_start", "context_lens"),
)
def _list_work(  # type: ignore[no-untyped-def]
    query_start,
    context_lens,
    tiles,
    starts,
    num_requests,
    capacity,
    search_steps,
    programs,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Build the tables in one program. A request is in the list if it has LEAST to MOST queries, and a context."""
    r = tl.arange(0, BLOCK_B)
    live = r < num_requests
    query_len = tl.load(query_start + r + 1, mask=live, other=0) - tl.load(query_start + r, mask=live, other=0)
    taken = (query_len >= LEAST) & (query_len <= MOST) & (tl.load(context_lens + r, mask=live, other=0) > 0)
    ends = tl.cumsum(tl.where(taken, (query_len + BLOCK_Q - 1) // BLOCK_Q, 0), 0)
    count = tl.max(ends, 0)
    stride = capacity + 1
    total = tl.zeros((), dtype=tl.int32)
    for first_tile in range(0, count, BLOCK_I):
        i = first_tile + tl.arange(0, BLOCK_I)
        in_use = i < count
        is_before = ends[None, :] <= i[:, None]
        request = tl.where(in_use, tl.sum(is_before.to(tl.int32), 1), 0)
        first = (i - tl.max(tl.where(is_before, ends[None, :], 0), 1)) * BLOCK_Q
        context_len = tl.load(context_lens + request)
        length = tl.load(query_start + request + 1) - tl.load(query_start + request)
        first_position = context_len - length + first
        num_keys = tl.minimum(first_position + BLOCK_Q, context_len)
        if WINDOW > 0:
            num_keys -= tl.maximum(first_position - WINDOW + 1, 0)
        chunks = tl.where(in_use, (num_keys + CHUNK - 1) // CHUNK, 0)
        tl.store(tiles + i, request, mask=in_use)
        tl.store(tiles + stride + i, first, mask=in_use)
        tl.store(tiles + 2 * stride + i, total + tl.cumsum(chunks, 0) - chunks, mask=in_use)
        total += tl.sum(chunks, 0)
    for first_tile in range(count, stride, BLOCK_I):
        i = first_tile + tl.arange(0, BLOCK_I)
        tl.store(tiles + 2 * stride + i, total, mask=i < stride)
    tl.debug_barrier()  # the program reads data written by its other threads

    share = (total * NUM_KV_HEADS + programs - 1) // programs
    for first_program in range(0, programs, BLOCK_P):
        p = first_program + tl.arange(0, BLOCK_P)
        # The last tile that begins at or before the program's first unit, by bisection.
        tile = tl.zeros((BLOCK_P,), dtype=tl.int32)
        for bit in range(0, search_steps):
            step = tile + (1 << (search_steps - 1 - bit))
            begins = tl.load(tiles + 2 * stride + step, mask=step < count, other=0)
            tile = tl.where((step < count) & (begins * NUM_KV_HEADS <= p * share), step, tile)
        tl.store(starts + p, tile, mask=p < programs)
