"""Division of attention into equal shares: the lists against a slow twin, and the bytes that each program reads."""

from collections import Counter
from itertools import accumulate

import pytest
import torch

from kernels.gpu import attention_work
from kernels.gpu.attention_work import DECODE, PREFILL, list_work
from kernels.gpu.paged_attention import paged_attention
from tests.kernels.gpu.test_paged_attention import make

HEADS, KV_HEADS = 32, 8


def lists(lengths, device, window=0, max_query_len=None, kv_heads=KV_HEADS):
    starts = torch.tensor([0, *accumulate(queries for queries, _ in lengths)], dtype=torch.int32, device=device)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device)
    return list_work(
        starts,
        contexts,
        HEADS,
        kv_heads,
        num_tokens=int(starts[-1]),
        max_query_len=max_query_len or max(queries for queries, _ in lengths),
        sliding_window=window,
    )


def twin(lengths, block_q, chunk, window, least, most):
    """Return (request, first query, chunks) of each tile."""
    found = []
    for request, (queries, context) in enumerate(lengths):
        if context and least <= queries <= most:
            for first in range(0, queries, block_q):
                position = context - queries + first
                begin = max(0, position - window + 1) if window else 0
                found.append((request, first, -(-(min(position + block_q, context) - begin) // chunk)))
    return found


def units(work, kv_heads=KV_HEADS):
    """Return the units of each program as (tile, head, chunk), walked as the kernel walks them."""
    begins, starts = work.tiles[2].tolist(), work.starts.tolist()
    total = begins[-1] * kv_heads
    share = -(-total // work.programs)
    found = []
    for program in range(work.programs):
        tile, own = starts[program], []
        for unit in range(program * share, min(program * share + share, total)):
            while unit >= begins[tile + 1] * kv_heads:
                tile += 1
            head, chunk = divmod(unit - begins[tile] * kv_heads, begins[tile + 1] - begins[tile])
            own.append((tile, head, chunk))
        found.append(own)
    return found


@pytest.mark.parametrize("window", [0, 300])
def test_lists_against_the_twin(window, device):
    generator = torch.Generator().manual_seed(window)

    def draw(most):
        return int(torch.randint(most, (), generator=generator))

    for trial in range(12):
        lengths = []
        for _ in range(1 + draw(140 if trial == 0 else 12)):
            queries = (0, 1, 1, 1, 1 + draw(5), 1 + draw(200))[draw(6)]
            lengths.append((queries, queries + draw(1500) if queries else draw(2) * 9))
        work = lists(lengths, device, window, max_query_len=4096)
        for each, sizes, least, most in zip(work, (DECODE, PREFILL), (1, 5), (4, 10**9), strict=True):
            expected = twin(lengths, each.block_q, sizes.chunk, window, least, most)
            count = len(expected)
            assert list(zip(*each.tiles[:2, :count].tolist(), strict=True)) == [tile[:2] for tile in expected]
            ends = [0, *accumulate(chunks for _, _, chunks in expected)]
            assert each.tiles[2].tolist() == ends + ends[-1:] * (each.tiles.shape[1] - len(ends))
            every = [
                (tile, head, chunk)
                for tile, (_, _, chunks) in enumerate(expected)
                for head in range(KV_HEADS)
                for chunk in range(chunks)
            ]
            assert [unit for own in units(each) for unit in own] == every


def test_a_long_context_among_short_ones_costs_its_own_bytes(device, monkeypatch):
    """On an H200, no program of a decode step has more than one chunk over its share, whatever one context is."""
    monkeypatch.setattr(attention_work, "_num_sms", lambda device: 132)
    lengths = [(1, 100_000), *[(1, 500)] * 64]
    [work] = lists(lengths, device)
    counts = [len(own) for own in units(work)]
    total = KV_HEADS * (-(-100_000 // DECODE.chunk) + 64 * -(-500 // DECODE.chunk))
    assert sum(counts) == total
    assert max(counts) * work.programs / total < 1.1
    # A program for each request and head would read 100,000 keys.
    assert max(counts) * DECODE.chunk < 3000


def test_each_program_reads_its_share_of_the_bytes(device, monkeypatch):
    """Count the bytes of keys and values that each interpreted program loads."""
    if device.type == "cuda":
        pytest.skip("counts loads in the interpreter")
    from triton.runtime import interpreter

    lengths = [(1, 6000), *[(1, 60)] * 12]
    arguments = make((4, 2, 16), lengths, torch.float32, device)
    begins = [(cache.data_ptr(), cache.data_ptr() + cache.nbytes) for cache in arguments[1:3]]
    read: Counter[int] = Counter()
    builder = interpreter.interpreter_builder
    load = type(builder).create_masked_load

    def counting(self, pointers, mask, *rest):
        inside = sum(((begin <= pointers.data) & (pointers.data < end) & mask.data).sum() for begin, end in begins)
        read[self.grid_idx[0]] += 4 * int(inside)
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(type(builder), "create_masked_load", counting)
    work = list_work(*arguments[4:6], 4, 2, num_tokens=len(arguments[0]), max_query_len=1)
    paged_attention(*arguments, work=work)
    row = 2 * 16 * 4  # key and value of one head
    assert sum(read.values()) == 2 * row * (6000 + 12 * 60)
    assert max(read.values()) <= sum(read.values()) / work[0].programs + 2 * DECODE.chunk * row
