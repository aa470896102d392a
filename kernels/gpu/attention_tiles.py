"""Division of a step's attention into programs: tile sizes, and the list of a step's tiles."""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from kernels.gpu.segments import spread

MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes of paged attention.

    block_m: rows of a program, query tokens times the heads of a group; larger for wider groups. block_n: keys per
    iteration, half as many if a head's row exceeds 256 bytes. min_split: minimum keys per split; below it, combining
    costs more than it saves.
    """

    block_m: int
    block_n: int
    min_split: int
    num_warps: int
    num_stages: int


# Not measured; benchmarks/gpu/plans.py has not run on a GPU yet. Decode: the smallest tile that tl.dot accepts, and
# splits of two iterations, so that one request of 512 tokens keeps 32 programs busy. Prefill: 128 rows, tensor-core
# work for two warpgroups.
DECODE = Tile(16, 64, 128, num_warps=4, num_stages=3)
PREFILL = Tile(128, 64, 128, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Work list of a step, the same for every layer.

    num_tiles: capacity of the grid in tiles. tiles: `[2, num_tiles]` int32, request and first query token (within the
    request) of each tile; None in a decode step, where tile i is request i, so a decode graph depends only on shapes.
    tiles_in_use: `[1]` int32, None with `tiles`. block_q: query tokens in a tile. num_splits: maximum number of splits
    of a request's keys.
    """

    tile: Tile

    num_tiles: int
    tiles: Tensor | None
    tiles_in_use: Tensor | None
    block_q: int
    num_splits: int


def build_attention_metadata(
    query_start: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    num_tokens: int,
    max_query_len: int,
    max_context_len: int,
    tile: Tile | None = None,
) -> AttentionMetadata:
    """Divide the step's queries into tiles with torch ops on the device, without a host sync.

    `max_query_len` and `max_context_len` are upper bounds and need not be exact. With a `max_query_len` of 1, no device
    op runs and the result depends only on shapes and bounds.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads: expected a multiple of {num_kv_heads} key-value heads, got {num_heads}")
    group = num_heads // num_kv_heads
    tile = tile or (DECODE if max_query_len == 1 else PREFILL)
    tile = replace(tile, block_m=max(tile.block_m, triton.next_power_of_2(group)))
    block_q = 1 if max_query_len == 1 else tile.block_m // group
    num_requests = query_start.shape[0] - 1
    used = min(num_requests, num_tokens)
    most = num_requests if max_query_len == 1 else used + (num_tokens - used) // block_q
    wanted = 4 * _num_sms(query_start.device) // max(most * num_kv_heads, 1)
    num_splits = max(1, min(wanted, max_context_len // tile.min_split, MAX_SPLITS))
    if max_query_len == 1 or most == 0:
        return AttentionMetadata(tile, most, None, None, block_q, num_splits)
    lengths = query_start[1:] - query_start[:-1]
    request, nth, count = spread((lengths + block_q - 1) // block_q, most)
    tiles = torch.stack((request, nth * block_q)).to(torch.int32)
    return AttentionMetadata(tile, most, tiles, count.to(torch.int32).view(1), block_q, num_splits)


@cache
def _num_sms(device: torch.device) -> int:
    """Return the device's number of multiprocessors; 16 in the interpreter, so that it also tests splits."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
