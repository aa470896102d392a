"""Routing of a step's tokens to LoRA adapters, built once and read by every layer.

Tokens are sorted by adapter and divided into chunks of at most `tile_sizes.block_m` rows of one adapter. Everything is
built on the device of `adapter_index`, without a host sync, into tables whose sizes depend only on shapes; `counts` on
the device holds the part in use. A CUDA graph can therefore contain the build, and replay with any mix of adapters.

Up to `MAX_ROUTED` tokens (every decode step) the build is one launch of one program. Longer inputs use a few torch ops,
whose cost is negligible in a prefill of that length. Both give the same tables.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import LoraRouting


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Tile sizes of the two segmented-LoRA kernels.

    block_m: rows of one adapter in a chunk. block_r: rank rows in a tile (tl.dot wants at least 16 of both). block_k:
    input features that a shrink program loads at a time. k_per_split: input features that one shrink program sums, so
    split-K is `in_features / k_per_split` planes. block_n: output columns of an expand program. programs_per_sm:
    persistent programs launched for each multiprocessor.
    """

    block_m: int
    block_r: int
    block_k: int
    k_per_split: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# Few rows per adapter: reading the adapters' weights dominates, so small chunks, wide loads and many programs.
DECODE = TileSizes(16, 16, 256, 1024, 256, num_warps=4, num_stages=3, programs_per_sm=6)
# Many rows per adapter: tensor-core tiles that reuse each weight tile for 64 rows. Two splits of 4,096 features: a
# prefill chunk of 512 tokens has only 8 chunks of rows, too few for 132 multiprocessors without a split.
PREFILL = TileSizes(64, 32, 64, 2048, 128, num_warps=4, num_stages=3, programs_per_sm=4)

# (maximum rows per adapter, tile sizes). Not measured: chosen by hand from Llama-3.1-8B shapes and the H200's shared
# memory and latency; benchmarks/gpu/plans.py has not run on one yet.
TILE_SIZES: tuple[tuple[float, TileSizes], ...] = ((32, DECODE), (float("inf"), PREFILL))


MAX_ROUTED = 1024


def choose_tile_sizes(rows_per_adapter: float) -> TileSizes:
    return next(tile_sizes for limit, tile_sizes in TILE_SIZES if rows_per_adapter <= limit)


@dataclass(frozen=True, slots=True)
class Segments:
    """The routing of a step; C = maximum chunks, X = maximum (chunk, rank tile) pairs for the shapes. All int32.

    rows: `[T]` token index at each sorted position, base tokens last; None if one adapter has all tokens, in order.
    chunks: `[3, C + 1]` slot, first sorted position and rank of each chunk; a chunk ends where the next begins. The
        slot of a chunk not in use is any valid one.
    pages: `[C, max_pages]` physical pages of each chunk's adapter, so that a kernel finds them by the chunk alone.
    tiles: `[2, X]` chunk and rank tile of each piece of shrink work.
    counts: `[2]` chunks and tiles in use.
    scales: by the address of a pool's fp32 table of scales: the table `[num_slots, S]`, and its rows by chunk `[C, S]`.
    """

    tile_sizes: TileSizes
    page_rank: int
    num_tokens: int
    rows: Tensor | None
    chunks: Tensor
    pages: Tensor
    tiles: Tensor
    counts: Tensor
    scales: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def chunk_scales(self, scales: Tensor) -> Tensor:
        """Return the scales of each chunk's adapter, `[C, at least num_slices]`. scales: a group's, columns of its
        pool's table.

        All groups of a pool share one gather, so that no layer adds a launch. Raises ValueError for other scales.
        """
        width, storage = scales.stride(0), scales.untyped_storage()
        column = scales.storage_offset()
        if scales.dtype != torch.float32 or column + scales.shape[1] > width or scales.stride(1) != 1:
            raise ValueError(f"scales: expected columns of a float32 table, got {scales.dtype} {scales.stride()}")
        if storage.data_ptr() not in self.scales:
            table = scales.as_strided((len(scales), width), (width, 1), 0)
            self.scales[storage.data_ptr()] = table, table.index_select(0, self.chunks[0, :-1])
        return self.scales[storage.data_ptr()][1][:, column:]

    def refill_scales(self) -> None:
        """Gather the scales again, in place, after the tables were refilled."""
        for table, gathered in self.scales.values():
            torch.index_select(table, 0, self.chunks[0, :-1], out=gathered)


def build_segments(
    routing: LoraRouting,
    page_rank: int,
    *,
    num_adapters: int | None = None,
    single_adapter: bool = False,
    tile_sizes: TileSizes | None = None,
) -> Segments:
    """Sort and divide the routing's tokens.

    `page_rank` is the pool's (`LoraGroup.a_pages.shape[2]`). `num_adapters`: maximum number of distinct adapters among
    the tokens, 1 or more, if the host knows it; it reduces the tables and selects the tile sizes. Omit it for a graph,
    which must accept any mix. `single_adapter`: the host knows that all tokens use the same adapter; then nothing is
    sorted.
    """
    num_tokens, num_slots = routing.adapter_index.shape[0], routing.ranks.shape[0]
    used = min(num_tokens, 1 if single_adapter else num_slots if num_adapters is None else num_adapters)
    tile_sizes = tile_sizes or choose_tile_sizes(num_tokens / used)
    max_chunks = used + (num_tokens - used) // tile_sizes.block_m
    max_rank_tiles = -(-routing.page_table.shape[1] * page_rank // tile_sizes.block_r)
    target = _empty(routing, page_rank, tile_sizes, max_chunks, max_rank_tiles, single_adapter)
    if target.rows is None:
        _cut(routing, target, max_rank_tiles)
    elif num_tokens <= MAX_ROUTED:
        _route[(1,)](
            routing.adapter_index,
            routing.ranks,
            routing.page_table,
            target.rows,
            target.chunks,
            target.pages,
            target.tiles,
            target.counts,
            num_tokens,
            num_slots,
            target.chunks.shape[1],
            target.tiles.shape[1],
            MAX_PAGES=routing.page_table.shape[1],
            MAX_RANK_TILES=max_rank_tiles,
            BLOCK_M=tile_sizes.block_m,
            BLOCK_R=tile_sizes.block_r,
            BLOCK_T=128 if num_tokens <= 128 else MAX_ROUTED,
            num_warps=8,
        )
    else:
        _sort(routing, target, target.rows)
    target.refill_scales()
    return target


def _empty(
    routing: LoraRouting,
    page_rank: int,
    tile_sizes: TileSizes,
    max_chunks: int,
    max_rank_tiles: int,
    single_adapter: bool,
) -> Segments:
    num_tokens = len(routing.adapter_index)

    def table(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=routing.adapter_index.device)

    return Segments(
        tile_sizes,
        page_rank,
        num_tokens,
        None if single_adapter else table(num_tokens),
        table(3, max_chunks + 1),
        table(max_chunks, routing.page_table.shape[1]),
        table(2, max_chunks * max_rank_tiles),
        table(2),
    )


def _cut(routing: LoraRouting, out: Segments, max_rank_tiles: int) -> None:
    """Build the tables if one adapter has every token: consecutive chunks, each with all of its rank tiles."""
    slot = routing.adapter_index[:1].long()
    max_chunks = out.chunks.shape[1] - 1
    out.chunks[0] = slot
    torch.arange(max_chunks + 1, out=out.chunks[1]).mul_(out.tile_sizes.block_m).clamp_(max=out.num_tokens)
    out.chunks[2] = routing.ranks[slot]
    out.pages.copy_(routing.page_table[slot].expand_as(out.pages))
    rank_tiles = (routing.ranks[slot] + out.tile_sizes.block_r - 1) // out.tile_sizes.block_r
    item = torch.arange(max_chunks * max_rank_tiles, device=slot.device)
    out.tiles[0] = item // rank_tiles.clamp(min=1)
    out.tiles[1] = item % rank_tiles.clamp(min=1)
    out.counts[0] = max_chunks
    out.counts[1:] = rank_tiles * max_chunks


def _sort(routing: LoraRouting, out: Segments, rows: Tensor) -> None:
    """Build the tables with torch ops, for any number of tokens."""
    tile_sizes, index, num_slots = out.tile_sizes, routing.adapter_index, routing.ranks.shape[0]
    max_chunks, max_tiles = out.chunks.shape[1] - 1, out.tiles.shape[1]
    order, sorted_rows = torch.where(index < 0, num_slots, index).to(torch.int32).sort(stable=True)
    bounds = torch.searchsorted(order, torch.arange(num_slots + 1, device=index.device, dtype=torch.int32))
    starts, ends = bounds[:-1], bounds[1:]

    slot, nth, num_chunks = spread((ends - starts + tile_sizes.block_m - 1) // tile_sizes.block_m, max_chunks)
    live = torch.arange(max_chunks, device=index.device) < num_chunks
    rows.copy_(sorted_rows)
    out.chunks[0, :-1] = slot
    out.chunks[1, :-1] = torch.where(live, starts[slot] + nth * tile_sizes.block_m, bounds[-1])
    out.chunks[1, -1:] = bounds[-1:]
    out.chunks[2, :-1] = routing.ranks[slot]
    out.pages.copy_(routing.page_table[slot])

    tiles_per_chunk = torch.where(live, (routing.ranks[slot] + tile_sizes.block_r - 1) // tile_sizes.block_r, 0)
    chunk, rank_tile, num_tiles = spread(tiles_per_chunk, max_tiles)
    out.tiles[0] = chunk
    out.tiles[1] = rank_tile
    out.counts[0] = num_chunks
    out.counts[1] = num_tiles


def spread(counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the owner and ordinal of each of `counts[i]` items, in order of i, and the total.

    The tables have a fixed size; entries past the total are in range but meaningless.
    """
    ends = counts.cumsum(0)
    item = torch.arange(size, device=counts.device)
    owner = torch.searchsorted(ends, item, right=True).clamp_(max=len(counts) - 1)
    return owner, item - (ends - counts)[owner], ends[-1]


@triton.jit(
    do_not_specialize=("num_tokens", "num_slots", "chunk_stride", "max_tiles"),
    do_not_specialize_on_alignment=("adapter_index",),
)
def _route(  # type: ignore[no-untyped-def]
    adapter_index,
    ranks,
    page_table,
    rows,
    chunks,
    pages,
    tiles,
    counts,
    num_tokens,
    num_slots,
    chunk_stride,
    max_tiles,
    MAX_PAGES: tl.constexpr,
    MAX_RANK_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Build the tables in one program: a counting sort by comparison, then prefix sums over the sorted positions."""
    OTHERS: tl.constexpr = 16
    t = tl.arange(0, BLOCK_T)
    live = t < num_tokens
    slot = tl.load(adapter_index + t, mask=live, other=-1)
    slot = tl.where(slot < 0, num_slots, slot)
    position = tl.zeros((BLOCK_T,), dtype=tl.int32)
    for first in range(0, num_tokens, OTHERS):
        u = first + tl.arange(0, OTHERS)
        other = tl.load(adapter_index + u, mask=u < num_tokens, other=-1)
        other = tl.where(u < num_tokens, tl.where(other < 0, num_slots, other), num_slots + 1)
        before = (other[None, :] < slot[:, None]) | ((other[None, :] == slot[:, None]) & (u[None, :] < t[:, None]))
        position += tl.sum(before.to(tl.int32), 1)
    tl.store(rows + position, t, mask=live)
    tl.debug_barrier()  # the program reads data written by its other threads

    slot = tl.load(adapter_index + tl.load(rows + t, mask=live, other=0), mask=live, other=-1)
    follows = live & (t > 0)
    previous = tl.load(adapter_index + tl.load(rows + t - 1, mask=follows, other=0), mask=follows, other=-1)
    uses_adapter = slot >= 0
    begins_adapter = uses_adapter & ((t == 0) | (slot != previous))
    adapter_start = tl.associative_scan(tl.where(begins_adapter, t, 0), 0, _larger)
    begins_chunk = uses_adapter & ((t - adapter_start) % BLOCK_M == 0)
    chunk = tl.cumsum(begins_chunk.to(tl.int32), 0) - 1
    num_chunks = tl.sum(begins_chunk.to(tl.int32), 0)
    tl.store(chunks + chunk, slot, mask=begins_chunk)
    tl.store(chunks + chunk_stride + chunk, t, mask=begins_chunk)
    tl.store(chunks + chunk_stride + num_chunks, tl.sum(uses_adapter.to(tl.int32), 0))
    tl.store(chunks + t, 0, mask=(t >= num_chunks) & (t < chunk_stride - 1))

    rank = tl.load(ranks + slot, mask=begins_chunk, other=0)
    tl.store(chunks + 2 * chunk_stride + chunk, rank, mask=begins_chunk)
    for p in range(MAX_PAGES):
        page = tl.load(page_table + slot * MAX_PAGES + p, mask=begins_chunk, other=0)
        tl.store(pages + chunk * MAX_PAGES + p, page, mask=begins_chunk)
    rank_tiles = (rank + BLOCK_R - 1) // BLOCK_R
    first_tile = tl.cumsum(rank_tiles, 0) - rank_tiles
    for r in range(MAX_RANK_TILES):
        has_tile = r < rank_tiles
        tl.store(tiles + first_tile + r, chunk, mask=has_tile)
        tl.store(tiles + max_tiles + first_tile + r, r, mask=has_tile)
    tl.store(counts, num_chunks)
    tl.store(counts + 1, tl.sum(rank_tiles, 0))


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)
