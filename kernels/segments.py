"""Routing of a step's tokens to LoRA adapters, made once and read by every layer. Torch only, no triton.

Tokens are sorted by adapter and cut into chunks of at most `plan.block_m` rows of one adapter. Everything is built
by torch ops on the device of `adapter_index`, without a host sync, into tables whose sizes depend on shapes alone;
how much of them is in use stands in `counts` on the device. A CUDA graph can therefore hold the build, or read
tables that `build_segments(..., out=...)` refills, and replay with any mix of adapters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import LoraRouting


@dataclass(frozen=True, slots=True)
class Plan:
    """Tile sizes of the two segmented-LoRA kernels.

    block_m: rows of one adapter in a chunk. block_r: rank rows in a tile (tl.dot wants at least 16 of both).
    block_k: input features a shrink program loads at a time. k_per_split: input features one shrink program sums,
    so split-K is `in_features / k_per_split` planes. block_n: output columns of an expand program.
    programs_per_sm: persistent programs launched for each multiprocessor.
    """

    block_m: int
    block_r: int
    block_k: int
    k_per_split: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# Few rows per adapter: the adapters' weights are the traffic, so small chunks, wide loads and many programs.
DECODE = Plan(16, 16, 256, 1024, 256, num_warps=4, num_stages=3, programs_per_sm=6)
# Many rows per adapter: tensor-core tiles that reuse each weight tile over 64 rows.
PREFILL = Plan(64, 32, 64, 4096, 128, num_warps=4, num_stages=3, programs_per_sm=4)

# (most rows per adapter, plan). Origin: not measured. Chosen by hand from Llama-3.1-8B shapes and the H200's shared
# memory and latency, until benchmarks/kernels/bench_segmented_lora.py has run on one.
PLANS: tuple[tuple[float, Plan], ...] = ((32, DECODE), (float("inf"), PREFILL))


def choose_plan(rows_per_adapter: float) -> Plan:
    return next(plan for limit, plan in PLANS if rows_per_adapter <= limit)


@dataclass(frozen=True, slots=True)
class Segments:
    """One step's routing; C = most chunks, X = most (chunk, rank tile) pairs that the shapes allow. All int32.

    active: False when the host knows that no token uses an adapter; `segmented_lora` then returns at once.
    rows: `[T]` token index at each sorted position, base tokens last.
    chunks: `[3, C]` slot, first sorted position and number of rows of each chunk.
    tiles: `[2, X]` chunk and rank tile of each piece of shrink work.
    counts: `[2]` chunks and tiles in use.
    page_table, ranks: the routing's own tensors (see `kernels.reference.LoraRouting`).
    """

    plan: Plan
    page_rank: int
    active: bool
    rows: Tensor
    chunks: Tensor
    tiles: Tensor
    counts: Tensor
    page_table: Tensor
    ranks: Tensor


def build_segments(
    routing: LoraRouting,
    page_rank: int,
    *,
    active: bool = True,
    num_adapters: int | None = None,
    plan: Plan | None = None,
    out: Segments | None = None,
) -> Segments:
    """Sorts and cuts the routing's tokens. Runs no device op when `active` is False.

    `page_rank` is the pool's (`LoraGroup.a_pages.shape[2]`). `num_adapters`: the most distinct adapters among the
    tokens, where the host knows it; it makes the tables smaller and picks the plan. Leave it out for a graph, which
    must take any mix. With `out`, the tables of an earlier result of the same shapes are refilled in place and `out`
    is returned; ValueError if the shapes differ. `out` reads `page_table` and `ranks` from the routing it was first
    built with, so the caller keeps those two up to date in place.
    """
    num_tokens, num_slots = routing.adapter_index.shape[0], routing.ranks.shape[0]
    used = min(num_tokens, num_slots if num_adapters is None else num_adapters)
    plan = out.plan if out is not None else plan or choose_plan(num_tokens / max(used, 1))
    if not active or used == 0:
        if out is not None:
            out.counts.zero_()
            return out
        none = routing.ranks.new_empty(0)
        return Segments(plan, page_rank, False, none, none, none, none, routing.page_table, routing.ranks)

    max_chunks = used + (num_tokens - used) // plan.block_m
    max_tiles = max_chunks * -(-routing.page_table.shape[1] * page_rank // plan.block_r)
    index = routing.adapter_index
    order, rows = torch.where(index < 0, num_slots, index).to(torch.int32).sort(stable=True)
    bounds = torch.searchsorted(order, torch.arange(num_slots + 1, device=index.device, dtype=torch.int32))
    starts, ends = bounds[:-1], bounds[1:]

    slot, nth, num_chunks = spread((ends - starts + plan.block_m - 1) // plan.block_m, max_chunks)
    start = starts[slot] + nth * plan.block_m
    chunks = torch.stack((slot, start, (ends[slot] - start).clamp_(max=plan.block_m))).to(torch.int32)

    live = torch.arange(max_chunks, device=index.device) < num_chunks
    tiles_per_chunk = torch.where(live, (routing.ranks[slot] + plan.block_r - 1) // plan.block_r, 0)
    chunk, rank_tile, num_tiles = spread(tiles_per_chunk, max_tiles)
    tiles = torch.stack((chunk, rank_tile)).to(torch.int32)
    counts = torch.stack((num_chunks, num_tiles)).to(torch.int32)

    tables = (rows.to(torch.int32), chunks, tiles, counts)
    if out is None:
        return Segments(plan, page_rank, True, *tables, routing.page_table, routing.ranks)
    for old, new in zip((out.rows, out.chunks, out.tiles, out.counts), tables, strict=True):
        if old.shape != new.shape:
            raise ValueError(f"out: expected tables of the same shapes, got {tuple(old.shape)}, not {tuple(new.shape)}")
        old.copy_(new)
    return out


def spread(counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lists owner and ordinal of each of `counts[i]` items, in order of i, in tables of a fixed size; and the total.

    Entries past the total are in range but mean nothing.
    """
    ends = counts.cumsum(0)
    item = torch.arange(size, device=counts.device)
    owner = torch.searchsorted(ends, item, right=True).clamp_(max=len(counts) - 1)
    return owner, item - (ends - counts)[owner], ends[-1]
