"""Paged attention with Llama-3.1-8B's heads: decode against the copy bandwidth, prefill against the matrix rate."""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from benchmarks.kernels.measure import Work, copies_past_l2
from kernels import reference
from kernels.gpu.attention_work import list_work
from kernels.gpu.paged_attention import paged_attention

TITLE = "Paged attention"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16


def make(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return arguments of paged_attention up to context_lens, with shuffled blocks; lengths: (queries, context)."""
    num_heads, num_kv_heads, head_dim = heads
    width = max(-(-context // BLOCK_SIZE) for _, context in lengths)
    num_blocks = len(lengths) * width
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
    starts = [0, *accumulate(queries for queries, _ in lengths)]
    cache_shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
    return (
        torch.randn(starts[-1], num_heads, head_dim, dtype=dtype, device=device),
        torch.randn(cache_shape, dtype=dtype, device=device),
        torch.randn(cache_shape, dtype=dtype, device=device),
        order.view(len(lengths), width).to(device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
    )


def work(name: str, lengths: list[tuple[int, int]], least_bandwidth: float = 0, least_matrix: float = 0) -> Work:
    kv_bytes = sum(context for _, context in lengths) * NUM_KV_HEADS * HEAD_DIM * 2 * 2
    num_tokens = sum(queries for queries, _ in lengths)
    # Query j of q sees context - q + j + 1 keys.
    scores = sum(queries * (context - queries) + queries * (queries + 1) // 2 for queries, context in lengths)
    copies = copies_past_l2(kv_bytes)
    arguments = [
        make(lengths, (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM), torch.bfloat16, torch.device("cuda")) for _ in range(copies)
    ]
    queries = max(queries for queries, _ in lengths)
    lists = list_work(*arguments[0][4:6], NUM_HEADS, NUM_KV_HEADS, num_tokens=num_tokens, max_query_len=queries)
    return Work(
        name,
        [partial(paged_attention, *a, HEAD_DIM**-0.5, work=lists) for a in arguments],
        kv_bytes + 2 * num_tokens * NUM_HEADS * HEAD_DIM * 2,
        4 * scores * NUM_HEADS * HEAD_DIM,
        least_bandwidth=least_bandwidth,
        least_matrix=least_matrix,
    )


def works(quick: bool) -> Iterator[Work]:
    decodes = [(64, 512), (64, 2048)] if quick else [(1, 512), (1, 8192), (8, 8192), (64, 512), (64, 2048), (32, 8192)]
    for batch, context in decodes:
        yield work(f"decode {batch} x {context}", [(1, context)] * batch, 0.9 if context >= 2048 else 0)
    for batch, length in [(4, 512)] if quick else [(4, 512), (1, 2048), (4, 2048), (1, 8192)]:
        yield work(f"prefill {batch} x {length}", [(length, length)] * batch, least_matrix=0.6)
    yield work("decode 1 x 100,000 among 64 x 512", [(1, 100_000)] + [(1, 512)] * 64, 0.8)
    yield work("mixed: prefill 512 beside decode 32 x 1024", [(512, 512)] + [(1, 1024)] * 32)


def dry_run(device: torch.device, dtype: torch.dtype) -> None:
    """Check one small case against the reference, on any device. Raises AssertionError if they differ."""
    arguments = make([(1, 300), (9, 20), (1, 1)], (4, 2, 32), dtype, device)
    expected = reference.paged_attention(*arguments, 0.2)
    torch.testing.assert_close(paged_attention(*arguments, 0.2), expected, atol=2e-2, rtol=2e-2)
