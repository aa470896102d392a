"""Segmented LoRA on Llama-3.1-8B's projections, beside the base projection whose output it adds to."""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from benchmarks.kernels.measure import Work, copies_past_l2
from kernels import reference
from kernels.gpu.segmented_lora import segmented_lora
from kernels.gpu.segments import build_segments
from kernels.reference import LoraGroup, LoraRouting

TITLE = "Segmented LoRA"
PAGE_RANK = 8
NUM_SLOTS = 256  # more slots than adapters in a step: unused slots must cost nothing
# in_features, offsets
GROUPS = {
    "qkv": (4096, (0, 4096, 5120, 6144)),
    "o": (4096, (0, 4096)),
    "gate_up": (4096, (0, 14336, 28672)),
    "down": (14336, (0, 4096)),
}
MIXED = (8, 16, 32, 64, 128)


def make_routing(num_tokens: int, ranks: list[int], max_rank: int, device: torch.device) -> tuple[LoraRouting, int]:
    """Assign tokens to the adapters in turn; return the routing and the number of used pages."""
    pages_of = [-(-rank // PAGE_RANK) for rank in ranks]
    free = torch.randperm(sum(pages_of), generator=torch.Generator().manual_seed(0)).tolist()
    page_table = torch.full((NUM_SLOTS, -(-max_rank // PAGE_RANK)), -1, dtype=torch.int32)
    for slot, count in enumerate(pages_of):
        for j in range(count):
            page_table[slot, j] = free.pop()
    index = torch.arange(num_tokens, dtype=torch.int32) % len(ranks)
    rank_tensor = torch.tensor(ranks + [0] * (NUM_SLOTS - len(ranks)), dtype=torch.int32)
    return LoraRouting(index.to(device), page_table.to(device), rank_tensor.to(device)), sum(pages_of)


def make_group(
    in_features: int, offsets: tuple[int, ...], num_pages: int, dtype: torch.dtype, device: torch.device
) -> LoraGroup:
    slices = len(offsets) - 1
    return LoraGroup(
        torch.randn(num_pages, slices, PAGE_RANK, in_features, dtype=dtype, device=device) / in_features**0.5,
        torch.randn(num_pages, PAGE_RANK, offsets[-1], dtype=dtype, device=device),
        torch.ones(NUM_SLOTS, slices, device=device),
        offsets,
    )


def work(name: str, group_name: str, num_tokens: int, ranks: list[int]) -> Work:
    device, dtype = torch.device("cuda"), torch.bfloat16
    in_features, offsets = GROUPS[group_name]
    slices, out_features = len(offsets) - 1, offsets[-1]
    routing, num_pages = make_routing(num_tokens, ranks, max(ranks), device)
    # A decode step's graph is captured before its adapters are known, so small steps get no number of adapters.
    adapters = len(ranks) if num_tokens > 256 else None
    segments = build_segments(routing, PAGE_RANK, num_adapters=adapters)
    weights = 2 * sum(ranks) * (slices * in_features + out_features)
    num_bytes = weights + 2 * num_tokens * (in_features + 2 * out_features)
    copies = copies_past_l2(num_bytes)
    groups = [make_group(in_features, offsets, num_pages, dtype, device) for _ in range(copies)]
    x = torch.randn(num_tokens, in_features, dtype=dtype, device=device)
    y = torch.zeros(num_tokens, out_features, dtype=dtype, device=device)
    shape = (out_features, in_features)
    base = copies_past_l2(2 * out_features * in_features)
    weight = [torch.randn(shape, dtype=dtype, device=device) for _ in range(base)]
    rank_of_token = sum(ranks[t % len(ranks)] for t in range(num_tokens))
    return Work(
        name,
        [partial(segmented_lora, y, x, g, segments) for g in groups],
        num_bytes,
        2 * rank_of_token * (slices * in_features + out_features),
        [partial(linear, x, w) for w in weight],
    )


def works(quick: bool) -> Iterator[Work]:
    """Return decode of 64 rows over 1 to 64 adapters, mixed ranks, and prefill of 2,048 rows."""
    for group in ["qkv"] if quick else GROUPS:
        for adapters in [1, 64] if quick else [1, 8, 32, 64]:
            for rank in [16] if quick else [16, 64]:
                yield work(f"decode 64, {group}, {adapters} x r{rank}", group, 64, [rank] * adapters)
        ranks = [MIXED[i % len(MIXED)] for i in range(64)]
        yield work(f"decode 64, {group}, 64 x r8-128 (sum {sum(ranks)})", group, 64, ranks)
        for adapters in (1, 8):
            yield work(f"prefill 2048, {group}, {adapters} x r16", group, 2048, [16] * adapters)


def dry_run(device: torch.device, dtype: torch.dtype) -> None:
    """Check one small case against the reference, on any device. Raises AssertionError if they differ."""
    routing, num_pages = make_routing(20, [8, 16, 40], 40, device)
    group = make_group(64, (0, 48, 80), num_pages, dtype, device)
    x, y = torch.randn(20, 64, dtype=dtype, device=device), torch.zeros(20, 80, dtype=dtype, device=device)
    expected = y.clone()
    segments = build_segments(routing, PAGE_RANK)
    segmented_lora(y, x, group, segments)
    reference.segmented_lora(expected, x, group, routing)
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)
