"""The CPU's ops, native and plain torch, against `kernels.reference`."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.batch import Batch
from kernels.cpu import native, native_build
from kernels.cpu.plain import TorchOps
from kernels.memory import HugePages
from kernels.ops import KvCache, Ops
from kernels.reference import LoraGroup, LoraRouting
from kernels.weights import dense

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}


@pytest.fixture(params=["native", "native, no matrix unit", "torch"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    if request.param == "torch":
        yield TorchOps()
        return
    library = native_build.load()
    assert library is not None, "the tests need a C++ compiler"
    ops = native.NativeOps(library)
    if not ops.use_matrix_unit(is_on=True) and request.param != "native":
        pytest.skip("needs a processor with a matrix unit")
    ops.use_matrix_unit(is_on=request.param == "native")
    yield ops
    ops.use_matrix_unit(is_on=True)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make_batch(counts: list[int], lengths: list[int], block_size: int, adapters: list[int] | None = None) -> Batch:
    """Return requests with `counts` new tokens each at the end of `lengths`, on shuffled blocks."""
    most = max(-(-n // block_size) for n in lengths)
    blocks = torch.randperm(most * len(lengths), generator=torch.Generator().manual_seed(1)).int().view(-1, most)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    positions = torch.cat([torch.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)])
    slots = blocks[owner, positions // block_size].long() * block_size + positions % block_size
    index = torch.tensor(adapters or [-1] * len(counts), dtype=torch.int32)[owner]
    return Batch(
        token_ids=torch.zeros(len(owner), dtype=torch.int64),
        positions=positions,
        slot_mapping=slots,
        query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=blocks,
        adapter_index=index,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        max_query_len=max(counts),
        adapter_slots=tuple(sorted(set(index.tolist()) - {-1})),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_norms_and_activation(ops: Ops, dtype: torch.dtype, rows: int) -> None:
    x, residual, weight = normal(rows, 576, dtype=dtype), normal(rows, 576, dtype=dtype) * 3, normal(576, dtype=dtype)
    for w in (weight, weight.float()):  # Gemma's weights are in fp32
        found = ops.rms_norm(x, w, 1e-5)
        assert found.dtype == dtype
        torch.testing.assert_close(found, reference.rms_norm(x, w, 1e-5), **TOLERANCE[dtype])
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    torch.testing.assert_close(ops.add_rms_norm(x, residual, weight, 1e-5), expected, **TOLERANCE[dtype])
    assert torch.equal(residual, expected_residual)
    gate_up = torch.cat((normal(rows, 500), torch.linspace(-200, 200, rows * 524).view(rows, 524)), -1).to(dtype)
    torch.testing.assert_close(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), **TOLERANCE[dtype])
    torch.testing.assert_close(ops.gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up), **TOLERANCE[dtype])


def test_an_fp32_weight_multiplies_before_rounding(ops: Ops) -> None:
    """A norm with an fp32 weight rounds once, a norm with a weight in the input's dtype rounds twice."""
    x, weight = normal(50, 576, dtype=torch.bfloat16), normal(576).bfloat16()
    h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    once, twice = (h * weight).bfloat16(), (h.bfloat16().float() * weight).bfloat16()
    found = ops.rms_norm(x, weight.float(), 1e-5)
    # The summation order of the squares may change a few results by one step of bf16.
    assert (found != once).float().mean() < 0.001
    assert (once != twice).float().mean() > 0.1
    assert (ops.rms_norm(x, weight, 1e-5) != twice).float().mean() < 0.001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (50, 70), (35, 33)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(ops: Ops, dtype: torch.dtype, in_features: int, out_features: int, bias: bool) -> None:
    weight = normal(out_features, in_features, dtype=dtype)
    b = normal(out_features, dtype=dtype) if bias else None
    packed = ops.pack(dense(weight, b))
    assert (packed.in_features, packed.out_features) == (in_features, out_features)
    for rows in (1, 5, 17, 130):
        x = normal(rows, in_features, dtype=dtype)
        y = ops.linear(x, packed, None, ops.step_tables(make_batch([rows], [rows], 16), None))
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, b), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 2, 128), (4, 4, 80)])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (40, 0.0), (0, 0.7), (40, 50.0)])
def test_attention_over_pages(
    ops: Ops, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, window: int, softcap: float
) -> None:
    lengths = [1, 20, 130, 70, 16, 64, 97]
    batch = make_batch([1, 20, 1, 5, 1, 64, 33], lengths, block_size)
    angles = torch.outer(torch.arange(200.0), 100.0 ** -torch.linspace(0, 1, dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    num_blocks = int(batch.block_tables.max()) + 1
    # A block may hold any values of its former owner, which must never reach an answer.
    caches = [torch.full((num_blocks, kv_heads, block_size, dim), torch.nan, dtype=dtype) for _ in range(2)]
    expected_caches = [torch.zeros_like(c) for c in caches]
    if isinstance(ops, TorchOps):
        caches = [c.clone() for c in expected_caches]
    earlier = make_batch(lengths, lengths, block_size)
    before = normal(earlier.num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    ops.rope_and_write_kv(before.clone(), cos_sin, KvCache(*caches), ops.step_tables(earlier, None))
    reference.rope_and_write_kv(before, earlier.positions, cos_sin, *expected_caches, earlier.slot_mapping)
    qkv = normal(batch.num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    step_tables = ops.step_tables(batch, None)
    q = ops.rope_and_write_kv(qkv.clone(), cos_sin, KvCache(*caches), step_tables)
    expected_q = reference.rope_and_write_kv(qkv, batch.positions, cos_sin, *expected_caches, batch.slot_mapping)
    torch.testing.assert_close(q, expected_q, **TOLERANCE[dtype])
    out = ops.paged_attention(q, KvCache(*caches), step_tables, dim**-0.5, window, softcap)
    bounds = batch.block_tables, batch.query_start, batch.context_lens
    expected = reference.paged_attention(expected_q, *expected_caches, *bounds, dim**-0.5, window, softcap=softcap)
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
    assert torch.equal(out, ops.paged_attention(q, KvCache(*caches), step_tables, dim**-0.5, window, softcap))
    if softcap == 0.7 and dtype == torch.float32:  # low enough to change the answer
        uncapped = ops.paged_attention(q, KvCache(*caches), step_tables, dim**-0.5, window)
        assert (out - uncapped).abs().max() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(9, 3, 64, 16), (8, 2, 128, 32), (4, 4, 80, 16)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (40, 50.0)])
def test_attention_over_int8_pages(
    ops: Ops, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, window: int, softcap: float
) -> None:
    lengths = [1, 20, 130, 70, 700, 64, 97]
    batch, earlier = make_batch([1, 20, 1, 5, 1, 64, 33], lengths, block_size), make_batch(lengths, lengths, block_size)
    angles = torch.outer(torch.arange(700.0), 100.0 ** -torch.linspace(0, 1, dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    shape = (int(batch.block_tables.max()) + 1, kv_heads, block_size, dim)
    # A block may hold any values and scales of its former owner.
    stale = 0.0 if isinstance(ops, TorchOps) else torch.nan
    cache = KvCache(
        *(torch.full(shape, 127, dtype=torch.int8) for _ in "kv"), *(torch.full(shape[:3], stale) for _ in "kv")
    )
    expected_cache = [torch.zeros(shape, dtype=torch.int8) for _ in "kv"]
    expected_scales = [torch.zeros(shape[:3]) for _ in "kv"]
    for step in (earlier, batch):
        qkv = normal(step.num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        q = ops.rope_and_write_kv(qkv.clone(), cos_sin, cache, ops.step_tables(step, None))
        expected_q = reference.rope_and_write_kv(
            qkv, step.positions, cos_sin, *expected_cache, step.slot_mapping, *expected_scales
        )
    out = ops.paged_attention(q, cache, ops.step_tables(batch, None), dim**-0.5, window, softcap)
    bounds = batch.block_tables, batch.query_start, batch.context_lens
    expected = reference.paged_attention(
        expected_q, *expected_cache, *bounds, dim**-0.5, window, *expected_scales, softcap
    )
    # Keys that differ in their last bit may be rounded to the next int8.
    tolerance = {"atol": 2e-3, "rtol": 0} if dtype == torch.float32 else TOLERANCE[dtype]
    torch.testing.assert_close(out, expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (700, 0.0), (700, 0.7)])
def test_attention_over_long_contexts(ops: Ops, dtype: torch.dtype, window: int, softcap: float) -> None:
    """The contexts are long enough to be cut into spans; a row's answer does not depend on the division of work."""
    heads, kv_heads, dim, counts, lengths = 6, 2, 64, [1, 40, 1], [1600, 1100, 30]
    batch = make_batch(counts, lengths, 16)
    num_blocks = int(batch.block_tables.max()) + 1
    cos_sin = torch.cat((torch.ones(1600, dim // 2), torch.zeros(1600, dim // 2)), -1)
    cache = KvCache(*(torch.zeros(num_blocks, kv_heads, 16, dim, dtype=dtype) for _ in range(2)))
    expected_cache = [torch.zeros_like(cache.k), torch.zeros_like(cache.v)]
    everything = make_batch(lengths, lengths, 16)
    qkv = normal(everything.num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    all_q = ops.rope_and_write_kv(qkv.clone(), cos_sin, cache, ops.step_tables(everything, None))
    reference.rope_and_write_kv(qkv, everything.positions, cos_sin, *expected_cache, everything.slot_mapping)
    wanted = torch.cat([torch.arange(e - c, e) for c, e in zip(counts, itertools.accumulate(lengths), strict=True)])
    q = all_q[wanted].contiguous()
    out = ops.paged_attention(q, cache, ops.step_tables(batch, None), dim**-0.5, window, softcap)
    bounds = batch.block_tables, batch.query_start, batch.context_lens
    expected = reference.paged_attention(q, *expected_cache, *bounds, dim**-0.5, window, softcap=softcap)
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
    if isinstance(ops, native.NativeOps):
        together = ops.paged_attention(all_q, cache, ops.step_tables(everything, None), dim**-0.5, window, softcap)
        assert torch.equal(together[wanted], out)


RANKS = [1, 4, 8, 16, 33, 64, 256]
POPULARITY = {
    "distinct": list(range(7)),
    "identical": [3] * 7,
    "skewed": [5, 5, 5, 5, 5, 0, 6],
    "with base rows": [-1, 2, -1, -1, 6, 2, -1],
    "none": [-1] * 7,
}


def make_lora(offsets: tuple[int, ...], dtype: torch.dtype) -> tuple[LoraGroup, SimpleNamespace]:
    """Return adapters of RANKS on shuffled pages, and the tables of a pool that holds them. in_features: 96."""
    in_features, page_rank = 96, 8
    pages = [-(-r // page_rank) for r in RANKS]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(2)).int()
    table = torch.full((len(RANKS), max(pages)), -1, dtype=torch.int32)
    for slot, owned in enumerate(order.split(pages)):
        table[slot, : len(owned)] = owned
    group = LoraGroup(
        normal(sum(pages), 3, page_rank, in_features, dtype=dtype) * 0.1,
        normal(sum(pages), page_rank, offsets[-1], dtype=dtype) * 0.1,
        normal(len(RANKS), 3).abs() + 0.5,
        offsets,
    )
    group.scales[2, 1] = 0  # an adapter that does not target this projection
    for slot, rank in enumerate(RANKS):  # rows beyond the adapter's rank are zero, as the pool leaves them
        last = table[slot, (rank - 1) // page_rank]
        group.a_pages[last, :, (rank - 1) % page_rank + 1 :] = 0
        group.b_pages[last, (rank - 1) % page_rank + 1 :] = 0
    ranks = torch.tensor(RANKS, dtype=torch.int32)
    return group, SimpleNamespace(page_table=table, ranks=ranks, page_rank=page_rank, groups=[])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("popularity", sorted(POPULARITY))
@pytest.mark.parametrize("counts", [[1] * 7, [1, 30, 1, 9, 1, 3, 100]])
def test_segmented_lora(ops: Ops, dtype: torch.dtype, popularity: str, counts: list[int]) -> None:
    group, tables = make_lora((0, 64, 96, 128), dtype)
    batch = make_batch(counts, counts, 16, POPULARITY[popularity])
    routing = LoraRouting(batch.adapter_index, tables.page_table, tables.ranks)
    x, packed = normal(batch.num_tokens, 96, dtype=dtype), ops.pack(dense(normal(128, 96, dtype=dtype)))
    step_tables = ops.step_tables(batch, tables)
    y = ops.linear(x, packed, group, step_tables)
    base = ops.linear(x, packed, None, step_tables)
    expected = base.clone()
    reference.segmented_lora(expected, x, group, routing)
    torch.testing.assert_close(y, expected, **TOLERANCE[dtype])
    rows = batch.adapter_index == -1
    assert torch.equal(y[rows], base[rows])
    assert torch.equal(y, ops.linear(x, packed, group, step_tables))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offsets", [(0, 64, 96, 128), (0, 40, 80, 120), (0, 20, 50, 61)])
@pytest.mark.parametrize("ops", ["native", "native, no matrix unit"], indirect=True)
def test_a_row_is_the_same_alone_and_among_others(ops: Ops, dtype: torch.dtype, offsets: tuple[int, ...]) -> None:
    """LoRA in the product or after it, and panels that straddle projections, give the same row alone and in a batch."""
    group, tables = make_lora(offsets, dtype)
    packed = ops.pack(dense(normal(offsets[-1], 96, dtype=dtype), normal(offsets[-1], dtype=dtype)))
    counts, adapters = [1, 19, 1, 3, 8, 40, 1], [2, 5, 2, -1, 0, 6, 4]
    batch = make_batch(counts, counts, 16, adapters)
    x = normal(batch.num_tokens, 96, dtype=dtype)
    together = ops.linear(x, packed, group, ops.step_tables(batch, tables))
    for row, adapter in enumerate(batch.adapter_index.tolist()):
        alone = ops.linear(
            x[row : row + 1], packed, group, ops.step_tables(make_batch([1], [1], 16, [adapter]), tables)
        )
        assert torch.equal(alone[0], together[row]), row
    expected = torch.nn.functional.linear(x, normal(offsets[-1], 96, dtype=dtype), normal(offsets[-1], dtype=dtype))
    routing = LoraRouting(batch.adapter_index, tables.page_table, tables.ranks)
    reference.segmented_lora(expected, x, group, routing)
    torch.testing.assert_close(together, expected, **TOLERANCE[dtype])


def test_work_items_cover_every_adapter_row_once() -> None:
    index = np.array([2, -1, 0, 2, 2, -1, 0] * 9, np.int32)
    order, items = native.segments(index)
    covered = np.concatenate([order[first:last] for _, first, last in items])
    assert sorted(covered) == sorted(np.flatnonzero(index >= 0))
    for slot, first, last in items:
        assert last - first <= native.LORA_ROWS
        assert (index[order[first:last]] == slot).all()


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native_build.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert native_build.load.__wrapped__() is None
    assert "no C++ compiler" in caplog.text


def test_one_thread_computes_all() -> None:
    library = native_build.load()
    assert library is not None
    one, two = native.NativeOps(library), native.NativeOps(library)
    one.threads, two.threads = 1, 2
    weight, x = normal(200, 64), normal(30, 64)
    step_tables = two.step_tables(make_batch([30], [30], 16), None)
    expected = two.linear(x, two.pack(dense(weight)), None, step_tables)
    assert torch.equal(one.linear(x, one.pack(dense(weight)), None, step_tables), expected)


def test_huge_pages_hold_tensors_side_by_side() -> None:
    memory = HugePages()
    tensors = [memory.empty(n, torch.bfloat16) for n in (1, 100, 40 << 20, 7)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
        assert tensor.data_ptr() % 64 == 0
    del memory
    assert [set(t.tolist()) if len(t) < 1000 else {t.min().item(), t.max().item()} for t in tensors] == [
        {0},
        {1},
        {2},
        {3},
    ]
