"""NaN and infinity of one tenant never reach another tenant's rows, in any op of any backend.

Each test runs a batch twice: with harmless numbers, and with poison in every row and page that is not the victim's. The
victim's rows must be equal bit for bit. In many kernels a mask is a product with 0, and 0 * NaN is NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.batch import Batch
from kernels.cpu import native, native_build
from kernels.cpu.plain import TorchOps
from kernels.gpu.ops import TritonOps
from kernels.ops import KvCache, Ops
from kernels.reference import LARGEST, LoraGroup
from kernels.weights import LinearWeights, Scheme, dense
from testing.interpreter import repeated
from tests.kernels.cpu import test_low_bits
from tests.kernels.cpu.test_native import make_batch
from tests.kernels.gpu.test_fp8 import check_that_rows_stay_apart

POISON = [torch.nan, torch.inf, -torch.inf, 1.7e38]
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 32, 16
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def native_ops() -> Ops:
    library = native_build.load()
    assert library is not None, "the tests need a C++ compiler"
    return native.NativeOps(library)


class ReferenceOps(TorchOps):
    """`kernels.reference`'s own attention in place of the padded one."""

    def paged_attention(
        self, q: Tensor, kv: KvCache, step_tables, scale: float, sliding_window: int, softcap: float = 0.0
    ) -> Tensor:
        b = step_tables.batch
        bounds = b.block_tables, b.query_start, b.context_lens
        scales = kv.k_scales, kv.v_scales
        return reference.paged_attention(q, kv.k, kv.v, *bounds, scale, sliding_window, *scales, softcap)


MAKERS = {"reference": ReferenceOps, "torch": TorchOps, "native": native_ops, "triton": TritonOps}
BACKENDS = [
    ("reference", torch.float32), ("torch", torch.float32), ("torch", torch.float16), ("torch", torch.bfloat16),
    ("native", torch.float32), ("native", torch.bfloat16),
    pytest.param(("triton", torch.float32), marks=pytest.mark.heavy), repeated(("triton", torch.float16)),
]  # fmt: skip


@pytest.fixture(params=BACKENDS, ids=lambda p: f"{p[0]}-{str(p[1])[6:]}")
def backend(request: pytest.FixtureRequest) -> tuple[Ops, torch.dtype]:
    if torch.cuda.is_available() and request.param[0] == "triton":
        pytest.skip("the tensors of this test are the CPU's")
    name, dtype = request.param
    return MAKERS[name](), dtype


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_turn(kinds: float | list[float], count: int) -> Tensor:
    kinds = torch.tensor(kinds).flatten()
    return kinds[torch.arange(count) % len(kinds)]


def new_cache(num_blocks: int, dtype: torch.dtype, fill: float | list[float]) -> KvCache:
    """Return a cache whose rows hold `fill`, the kinds in turn by token."""
    shape = (num_blocks, KV_HEADS, BLOCK, DIM)
    fills = in_turn(fill, BLOCK).expand(shape[:3])
    if dtype not in LARGEST:
        return KvCache(*(fills[..., None].expand(shape).to(dtype, copy=True) for _ in "kv"))
    rows = torch.full(shape, 100.0).to(dtype)
    return KvCache(rows, rows.clone(), fills.clone(), fills.clone())


@dataclass(frozen=True)
class Steps:
    """A step of attention and the one before it. victims: by request; the other requests are attackers."""

    earlier: Batch
    batch: Batch
    victims: Tensor
    dtype: torch.dtype
    window: int = 0
    softcap: float = 0.0


def attend(ops: Ops, steps: Steps, cache: KvCache, poison: float | list[float]) -> Tensor:
    """Write the earlier tokens' keys and values and return the attention output of the batch.

    poison: every number of the attackers, the kinds in turn by token.
    """
    batch, victims, dtype = steps.batch, steps.victims, steps.dtype
    cos_sin = torch.cat((torch.ones(256, DIM // 2), torch.zeros(256, DIM // 2)), -1)
    q = torch.empty(0)
    for seed, step in enumerate((steps.earlier, batch)):
        qkv = normal(seed, step.num_tokens, WIDTH).to(dtype)
        owner = torch.repeat_interleave(torch.arange(len(victims)), step.query_start.diff())
        others = ~victims[owner]
        qkv[others] = in_turn(poison, int(others.sum()))[:, None].to(dtype)
        q = ops.rope_and_write_kv(qkv, cos_sin, cache, ops.step_tables(step, None))
    return ops.paged_attention(q, cache, ops.step_tables(batch, None), DIM**-0.5, steps.window, steps.softcap)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (20, 3.0)])
def test_attention_reads_no_other_request_and_no_stale_row(
    backend: tuple[Ops, torch.dtype], window: int, softcap: float
) -> None:
    ops, dtype = backend
    check_attention(ops, dtype, dtype, window, softcap)


EIGHT_BITS = [("native", torch.int8), *(("torch", dtype) for dtype in LARGEST)]
EIGHT_BITS += [pytest.param("triton", dtype, marks=pytest.mark.heavy) for dtype in LARGEST]


@pytest.mark.parametrize(("name", "kv_dtype"), EIGHT_BITS)
def test_attention_over_8_bits_reads_no_stale_scale(name: str, kv_dtype: torch.dtype) -> None:
    for dtype in [torch.float32] if name == "triton" else [torch.float32, torch.bfloat16]:
        check_attention(MAKERS[name](), dtype, kv_dtype, 0, 0.0)


def check_attention(ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype, window: int, softcap: float) -> None:
    """Check decodes and prompts, short victims beside long attackers, in blocks that held an attacker's keys before.

    Each kind of poison runs alone, because NaN would hide infinity. In the interpreter, which takes seconds, the kinds
    alternate by token.
    """
    lengths, counts = [5, 50, 1, 33, 17, 40, 36], [1, 1, 1, 1, 17, 40, 3]
    if isinstance(ops, TritonOps):  # the interpreter takes seconds for each key-value head of a request
        lengths, counts = [5, 33, 17], [1, 1, 3]
    victims = torch.tensor([True, False, True, True, True, False, True])[: len(lengths)]
    batch, earlier = (make_batch(n, lengths, BLOCK) for n in (counts, lengths))
    tables = batch.block_tables.clone()
    for i, length in enumerate(lengths):  # as from the planner: entries beyond a request's own blocks belong to others
        tables[i, -(-length // BLOCK) :] = tables[1, 0]
    batch, earlier = replace(batch, block_tables=tables), replace(earlier, block_tables=tables)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), batch.query_start.diff())
    steps = Steps(earlier, batch, victims, dtype, window, softcap)

    def of_victims(value: float | list[float]) -> Tensor:
        cache = new_cache(int(tables.max()) + 1, kv_dtype, value)
        return attend(ops, steps, cache, value)[victims[owner]]

    clean = of_victims(0.5)
    for poison in [POISON] if isinstance(ops, TritonOps) else POISON:
        found = of_victims(poison)
        assert found.isfinite().all()
        assert torch.equal(found, clean)


@pytest.mark.parametrize("poison", POISON)
def test_padding_rows_reach_no_row(backend: tuple[Ops, torch.dtype], poison: float) -> None:
    """A captured decode step has rows without a request: slot -1, no context, arbitrary numbers."""
    if isinstance(backend[0], native.NativeOps):
        pytest.skip("no step of the native ops is captured")
    check_padding(*backend, poison)


def check_padding(ops: Ops, dtype: torch.dtype, poison: float) -> None:
    lengths = [5, 40, 1, 1]
    batch = make_batch([1] * 4, lengths, BLOCK)
    contexts, slots = batch.context_lens.clone(), batch.slot_mapping.clone()
    contexts[2:], slots[2:] = 0, -1
    padded = replace(batch, context_lens=contexts, slot_mapping=slots)
    victims = torch.tensor([True, True, False, False])
    steps = Steps(make_batch(lengths, lengths, BLOCK), padded, victims, dtype)
    found = []
    for value in (0.5, poison):
        cache = new_cache(int(batch.block_tables.max()) + 1, dtype, value)
        found.append(attend(ops, steps, cache, value)[:2])
    assert found[1].isfinite().all()
    assert torch.equal(*found)


def lora_pages(dtype: torch.dtype, poison: float) -> tuple[SimpleNamespace, LoraGroup]:
    """Return the pages of two adapters. Slot 0 is the victim's, of rank 12 and with its second slice untargeted.

    Slot 1 and every page and slice that the victim does not use hold poison.
    """
    sizes, in_features, rank, num_pages = (64, 32, 32), 96, 12, 6
    offsets = (0, 64, 96, 128)
    a, b = torch.full((num_pages, 3, 8, in_features), poison), torch.full((num_pages, 8, sum(sizes)), poison)
    table = torch.tensor([[4, 1, -1], [0, 3, 5]], dtype=torch.int32)
    for j, page in enumerate((4, 1)):
        rows = min(8, rank - 8 * j)
        a[page, :, :], b[page] = 0, 0
        a[page, :, :rows] = normal(j, 3, rows, in_features) / 10
        b[page, :rows] = normal(10 + j, rows, sum(sizes)) / 10
        a[page, 1], b[page, :, 64:96] = poison, poison  # a former owner's: untargeted slices are not overwritten
    scales = torch.tensor([[2.0, 0.0, 0.5], [1.0, 1.0, 1.0]])
    group = LoraGroup(a.to(dtype), b.to(dtype), scales, offsets)
    tables = SimpleNamespace(
        groups=[{"x": group}], embeddings={}, heads={}, page_rank=8, page_table=table,
        ranks=torch.tensor([rank, 24], dtype=torch.int32),
    )  # fmt: skip
    return tables, group


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("counts", [[1, 1, 1, 1, 1], [20, 9, 1, 3, 17]])
def test_an_adapters_weights_reach_its_own_rows_only(
    backend: tuple[Ops, torch.dtype], poison: float, counts: list[int]
) -> None:
    check_lora(*backend, poison, counts)


def check_lora(
    ops: Ops, dtype: torch.dtype, poison: float, counts: list[int], weights: LinearWeights | None = None
) -> None:
    """weights: `[128, 96]`; None: dense ones."""
    adapters = [0, 1, -1, 1, 0]
    batch = make_batch(counts, counts, BLOCK, adapters)
    owner = batch.adapter_index
    packed = ops.pack(weights or dense((normal(5, 128, 96) / 10).to(dtype)))
    found = []
    for value in (0.0, poison):
        tables, group = lora_pages(dtype, value)
        x = normal(6, batch.num_tokens, 96).to(dtype)
        x[owner == 1] = torch.tensor(value).to(dtype)
        found.append(ops.linear(x, packed, group, ops.step_tables(batch, tables))[owner != 1])
    assert found[1].isfinite().all()
    assert torch.equal(*found)


QUANTISED = [
    *(("torch", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *(("native", dtype) for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.mark.parametrize("scheme", test_low_bits.SCHEMES, ids=str)
@pytest.mark.parametrize(("name", "dtype"), QUANTISED, ids=str)
def test_rows_of_a_quantised_product_stay_apart(name: str, dtype: torch.dtype, scheme: Scheme) -> None:
    """In bf16 the native product rounds its inputs to 8 bits, with scales that a NaN or infinity must not share."""
    check_that_rows_stay_apart(MAKERS[name](), test_low_bits.make(scheme, 96, 64), dtype)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("name", "dtype"), QUANTISED, ids=str)
def test_an_adapter_beside_quantised_weights_reaches_its_own_rows_only(
    name: str, dtype: torch.dtype, kind: str, poison: float
) -> None:
    scheme = next(scheme for scheme in test_low_bits.SCHEMES if scheme.kind == kind)
    check_lora(MAKERS[name](), dtype, poison, [20, 9, 1, 3, 17], test_low_bits.make(scheme, 128, 96))


@pytest.mark.heavy
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tensors of this test are the CPU's")
@pytest.mark.parametrize("check", [
    lambda ops: check_attention(ops, torch.float16, torch.float16, 20, 3.0),
    lambda ops: check_padding(ops, torch.float16, torch.inf),
    lambda ops: check_lora(ops, torch.float16, torch.inf, [20, 9, 1, 3, 17]),
], ids=["attention", "padding", "lora"])  # fmt: skip
def test_triton_in_fp16(check: Callable[[Ops], None]) -> None:
    """Run one case of each test above in CI: a masked load's finite default may be infinite in fp16."""
    check(TritonOps())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("make", [TorchOps, native_ops, pytest.param(TritonOps, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("whole_row", [True, False])
def test_rows_without_numbers_draw_some_token_and_disturb_no_other(make, poison: float, whole_row: bool) -> None:
    logits = normal(7, 6, 300) * 3
    clean = logits.clone()
    logits[1::2, :: 1 if whole_row else 7] = poison
    parameters = (
        torch.tensor([0.0, 0.0, 1.0, 1.0, 0.7, 0.7]),
        torch.tensor([0, 0, 0, 20, 5, 5], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.9, 0.9, 1.0, 0.5]),
        torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.1]),
        torch.arange(6),
        torch.arange(6) + 1,
    )
    tokens = make().sample(logits, *parameters)
    assert torch.equal(
        tokens[::2], make().sample(clean[::2].clone(), *(column[::2].contiguous() for column in parameters))
    )
    assert ((tokens >= 0) & (tokens < 300)).all()
