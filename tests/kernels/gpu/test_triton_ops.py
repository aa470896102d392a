"""`TritonOps` against `TorchOps`: a whole decoder layer on one mixed batch, with adapters and without."""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch

from kernels.batch import Batch
from kernels.cpu.plain import TorchOps
from kernels.gpu.ops import TritonOps
from kernels.ops import KvCache, Ops
from kernels.reference import LoraGroup
from kernels.weights import dense

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, PAGE_RANK = 96, 160, 6, 2, 16, 16, 8
QKV = (NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM)
GROUPS = {"qkv": (HIDDEN, QKV), "o": (QKV[0], (HIDDEN,)), "gate_up": (HIDDEN, (INTERMEDIATE,) * 2)}
RANKS = (4, 24, 64)
# query_len, context_len and adapter of each request
REQUESTS = [(1, 40, 0), (1, 9, -1), (20, 20, 2), (7, 33, 1), (1, 17, 0)]


@dataclass(frozen=True)
class Tables:
    page_table: torch.Tensor
    ranks: torch.Tensor


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def lora(generator: torch.Generator) -> tuple[Tables, dict[str, LoraGroup]]:
    pages_of = [-(-rank // PAGE_RANK) for rank in RANKS]
    free = torch.randperm(sum(pages_of), generator=generator).tolist()
    page_table = torch.full((len(RANKS), max(pages_of)), -1, dtype=torch.int32)
    groups = {}
    for name, (in_features, sizes) in GROUPS.items():
        offsets = (0, *accumulate(sizes))
        a_pages = torch.zeros(len(free), len(sizes), PAGE_RANK, in_features)
        groups[name] = LoraGroup(
            a_pages, torch.zeros(len(free), PAGE_RANK, offsets[-1]), torch.ones(3, len(sizes)), offsets
        )
    for slot, rank in enumerate(RANKS):
        for j in range(pages_of[slot]):
            page = page_table[slot, j] = free.pop()
            rows = min(PAGE_RANK, rank - j * PAGE_RANK)
            for group in groups.values():
                group.a_pages[page, :, :rows] = randn(generator, *group.a_pages[page, :, :rows].shape)
                group.b_pages[page, :rows] = randn(generator, *group.b_pages[page, :rows].shape)
    return Tables(page_table, torch.tensor(RANKS, dtype=torch.int32)), groups


def make_batch() -> Batch:
    queries, contexts, _ = zip(*REQUESTS, strict=True)
    width = -(-max(contexts) // BLOCK_SIZE)
    block_tables = torch.arange(len(REQUESTS) * width, dtype=torch.int32).view(len(REQUESTS), width).flip(0)
    positions = [torch.arange(context - query, context) for query, context, _ in REQUESTS]
    slots = [block_tables[i][at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE for i, at in enumerate(positions)]
    return Batch(
        token_ids=torch.arange(sum(queries)),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        query_start=torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=block_tables,
        adapter_index=torch.tensor([a for q, _, a in REQUESTS for _ in range(q)], dtype=torch.int32),
        logits_rows=torch.arange(sum(queries)),
        max_query_len=max(queries),
        adapter_slots=(0, 1, 2),
    )


def to(value, device: torch.device):
    """Return the dataclass with its tensors on the device."""
    fields = {name: getattr(value, name) for name in type(value).__dataclass_fields__}
    return replace(value, **{k: v.to(device) for k, v in fields.items() if isinstance(v, torch.Tensor)})


def run_layer(
    ops: Ops, batch: Batch, tables: Tables | None, groups: dict[str, LoraGroup], device
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = -(-max(context for _, context, _ in REQUESTS) // BLOCK_SIZE)
    shape = (len(REQUESTS) * width, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    k_cache, v_cache = (torch.randn(shape, generator=generator).to(device) for _ in "kv")
    angles = torch.rand(64, HEAD_DIM // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
    embedding = torch.randn(batch.num_tokens, HIDDEN, generator=generator).to(device)
    weight = torch.rand(HIDDEN, generator=generator).to(device)
    packed = {
        name: ops.pack(dense(randn(generator, sum(sizes), in_features).to(device)))
        for name, (in_features, sizes) in GROUPS.items()
    }
    down = ops.pack(dense(randn(generator, HIDDEN, INTERMEDIATE).to(device), torch.ones(HIDDEN, device=device)))

    step_tables = ops.step_tables(batch, tables)
    residual = ops.embed(dense(embedding), batch.token_ids, embedding.dtype)
    x = ops.rms_norm(residual, weight, 1e-5)
    qkv = ops.linear(x, packed["qkv"], groups.get("qkv"), step_tables)
    q = ops.rope_and_write_kv(qkv, cos_sin, KvCache(k_cache, v_cache), step_tables)
    x = ops.paged_attention(q, KvCache(k_cache, v_cache), step_tables, HEAD_DIM**-0.5, 12, 3.0)
    x = ops.linear(x.view(len(x), -1), packed["o"], groups.get("o"), step_tables)
    x = ops.add_rms_norm(x, residual, weight, 1e-5)
    x = ops.linear(x, packed["gate_up"], groups.get("gate_up"), step_tables)
    x = ops.linear(ops.silu_and_mul(x) + ops.gelu_and_mul(x), down, None, step_tables)
    return [x, residual, k_cache, v_cache]


def decode_only(batch: Batch) -> Batch:
    """Return the last token of each request."""
    last = batch.query_start[1:].long() - 1
    return replace(
        batch,
        **{name: getattr(batch, name)[last] for name in ("positions", "slot_mapping", "adapter_index")},
        token_ids=torch.arange(len(last)),
        query_start=torch.arange(len(last) + 1, dtype=torch.int32),
        logits_rows=torch.arange(len(last)),
        max_query_len=1,
    )


@pytest.mark.parametrize("with_lora", [True, False])
def test_decode_layer(with_lora, device):
    cpu = torch.device("cpu")
    tables, groups = lora(torch.Generator().manual_seed(0)) if with_lora else (None, {})
    expected = run_layer(TorchOps(), decode_only(make_batch()), tables, groups, cpu)
    groups = {name: to(group, device) for name, group in groups.items()}
    got = run_layer(TritonOps(), to(decode_only(make_batch()), device), tables and to(tables, device), groups, device)
    for tensor, twin in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor.cpu(), twin, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("with_lora", [True, False])
def test_layer(with_lora, device):
    batch = to(make_batch(), device)
    tables, groups = lora(torch.Generator().manual_seed(0))
    tables, groups = to(tables, device), {name: to(group, device) for name, group in groups.items()}
    if not with_lora:
        tables, groups = None, {}
    got = run_layer(TritonOps(), batch, tables, groups, device)
    # The twin runs on the CPU: both devices start from the same numbers.
    cpu = torch.device("cpu")
    expected_groups = {name: to(group, cpu) for name, group in groups.items()}
    expected = run_layer(TorchOps(), make_batch(), tables and to(tables, cpu), expected_groups, cpu)
    for tensor, twin in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor.cpu(), twin, atol=2e-5, rtol=2e-5)


def test_base_rows_are_the_same_bits_with_and_without_lora(device):
    batch = to(make_batch(), device)
    tables, groups = lora(torch.Generator().manual_seed(0))
    tables, groups = to(tables, device), {name: to(group, device) for name, group in groups.items()}
    base = batch.adapter_index == -1
    with_lora = run_layer(TritonOps(), batch, tables, groups, device)
    without = run_layer(TritonOps(), batch, None, {}, device)
    assert torch.equal(with_lora[0][base], without[0][base])
    assert not torch.equal(with_lora[0], without[0])


def test_a_batch_of_base_rows_builds_no_segments(device):
    batch = to(make_batch(), device)
    batch = replace(batch, adapter_index=torch.full_like(batch.adapter_index, -1), adapter_slots=())
    tables, _ = lora(torch.Generator().manual_seed(0))
    assert TritonOps().step_tables(batch, to(tables, device)).routing is None
