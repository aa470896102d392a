"""Comparison of candidate tile sizes.

The first line of each table is the one in use (`kernels.gpu.segments.TILE_SIZES`, `kernels.gpu.attention_work.DECODE`
and `PREFILL`) and should be the fastest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from benchmarks.gpu.decode import PAGE_RANK, groups_of
from benchmarks.gpu.machine import Machine
from benchmarks.kernels.bench_paged_attention import make
from engine.model.families import parse_model_config
from kernels.gpu import attention_work, segments
from kernels.gpu.attention_work import list_work
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.segmented_lora import segmented_lora
from kernels.gpu.segments import build_segments
from kernels.reference import LoraGroup, LoraRouting

LORA_DECODE: tuple[dict[str, int], ...] = (
    {},
    {"k_per_split": 512},
    {"k_per_split": 2048},
    {"block_k": 128},
    {"block_n": 128},
    {"block_n": 512, "num_warps": 8},
    {"programs_per_sm": 12},
    {"num_stages": 4},
)
LORA_PREFILL: tuple[dict[str, int], ...] = ({}, {"k_per_split": 1024}, {"k_per_split": 4096}, {"block_k": 128})
DECODE: tuple[dict[str, int], ...] = (
    {},
    {"num_stages": 4},
    {"num_stages": 2},
    {"block_n": 128},
    {"block_n": 32, "num_stages": 4},
    {"num_warps": 2},
    {"chunk": 256},
    {"programs_per_sm": 2},
    {"programs_per_sm": 4},
)
PREFILL: tuple[dict[str, int], ...] = (
    {},
    {"num_stages": 2},
    {"num_stages": 4},
    {"block_n": 128, "num_stages": 2},
    {"block_m": 64, "num_warps": 4, "programs_per_sm": 2},
    {"chunk": 512},
)

# A row's measured case: the arguments of `_attention` or `_lora` before the sizes.
Case = TypeVar("Case")


def figures(machine: Machine) -> Iterator[str]:
    """Return the microseconds of each candidate, by case."""
    c = parse_model_config(machine.model)
    heads = c.num_heads, c.num_kv_heads, c.head_dim
    context, long = machine.context, 16 * machine.context
    decodes = ((1, context), (machine.lora_batch, 4 * context), (8, long))
    yield from _table(
        "attention, decode",
        DECODE[: machine.candidates],
        {f"{n} x {k}": (heads, [(1, k)] * n) for n, k in decodes},
        lambda case, change: _attention(machine, *case, decode=replace(attention_work.DECODE, **change)),
    )
    yield from _table(
        "attention, prefill",
        PREFILL[: machine.candidates],
        {f"{n} x {k}": (heads, [(k, k)] * n) for n, k in ((4, context), (1, long))},
        lambda case, change: _attention(machine, *case, prefill=replace(attention_work.PREFILL, **change)),
    )
    groups = {name: groups_of(c)[name] for name in ("qkv", "down")}
    adapters = machine.adapters[-1]
    yield from _table(
        f"LoRA, decode, {adapters} adapters of rank 16",
        LORA_DECODE[: machine.candidates],
        {name: (*shape, adapters, adapters) for name, shape in groups.items()},
        lambda case, change: _lora(machine, *case, replace(segments.DECODE, **change)),
    )
    rows = 4 * machine.context
    yield from _table(
        f"LoRA, {rows} rows of 8 adapters of rank 16",
        LORA_PREFILL[: machine.candidates],
        {"qkv": (*groups["qkv"], rows, 8)},
        lambda case, change: _lora(machine, *case, replace(segments.PREFILL, **change)),
    )


def _table(
    title: str,
    candidates: Sequence[dict[str, int]],
    cases: dict[str, Case],
    microseconds: Callable[[Case, dict[str, int]], float],
) -> Iterator[str]:
    yield f"\n| {title} | " + " | ".join(f"{name}, µs" for name in cases) + " |"
    yield "|---|" + "---|" * len(cases)
    for change in candidates:
        label = ", ".join(f"{name} {value}" for name, value in change.items()) or "as it is"
        yield f"| {label} | " + " | ".join(f"{microseconds(case, change):.1f}" for case in cases.values()) + " |"


def _attention(
    machine: Machine,
    heads: tuple[int, int, int],
    lengths: list[tuple[int, int]],
    decode: attention_work.Tile = attention_work.DECODE,
    prefill: attention_work.Tile = attention_work.PREFILL,
) -> float:
    num_heads, num_kv_heads, head_dim = heads
    sets = [make(lengths, heads, machine.dtype, machine.device) for _ in range(machine.copies)]
    work = list_work(
        *sets[0][4:6],
        num_heads,
        num_kv_heads,
        num_tokens=sum(queries for queries, _ in lengths),
        max_query_len=max(queries for queries, _ in lengths),
        decode=decode,
        prefill=prefill,
    )
    calls = [partial(paged_attention, *each, head_dim**-0.5, work=work) for each in sets]
    return 1000 * machine.milliseconds(*calls)


def _lora(
    machine: Machine, width: int, bounds: tuple[int, ...], num_rows: int, adapters: int, tile_sizes: segments.TileSizes
) -> float:
    pages, slices = 2 * adapters, len(bounds) - 1
    device, dtype = machine.device, machine.dtype
    index = torch.arange(num_rows, dtype=torch.int32, device=device) % adapters
    page_table = torch.arange(pages, dtype=torch.int32, device=device).view(adapters, 2)
    routing = LoraRouting(index, page_table, torch.full((adapters,), 16, dtype=torch.int32, device=device))
    tables = build_segments(routing, PAGE_RANK, num_adapters=adapters, tile_sizes=tile_sizes)
    groups = [
        LoraGroup(
            torch.randn(pages, slices, PAGE_RANK, width, dtype=dtype, device=device),
            torch.randn(pages, PAGE_RANK, bounds[-1], dtype=dtype, device=device),
            torch.full((adapters, slices), 0.01, device=device),
            bounds,
        )
        for _ in range(machine.copies)
    ]
    x = torch.randn(num_rows, width, dtype=dtype, device=device)
    y = torch.zeros(num_rows, bounds[-1], dtype=dtype, device=device)
    return 1000 * machine.milliseconds(*(partial(segmented_lora, y, x, group, tables) for group in groups))
