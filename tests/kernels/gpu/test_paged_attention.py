"""Paged attention in Triton against `kernels.reference`: prefill, decode, mixed; heads, blocks, windows, cuts."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from kernels import reference
from kernels.gpu import paged_attention as module
from kernels.gpu.attention_work import DECODE, PREFILL, list_work
from kernels.gpu.paged_attention import paged_attention
from testing.interpreter import repeated

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
KV_DTYPES = (torch.float8_e4m3fn, torch.int8)
# num_heads, num_kv_heads, head_dim
MODELS = {"SmolLM2": (9, 3, 64), "Llama-3.1-8B": (32, 8, 128), "Qwen3": (16, 8, 128)}
# (query_len, context_len) of each request
BATCHES = {
    "decode": [(1, 1), (1, 16), (1, 33), (1, 300)],
    "prefill": [(1, 1), (17, 17), (40, 40)],
    "chunked prefill": [(20, 100), (5, 37)],
    "mixed": [(1, 200), (24, 24), (1, 1), (9, 100)],
    "idle requests": [(0, 0), (1, 40), (0, 9), (3, 3), (0, 0)],
}


def make(model, lengths, dtype, device, block_size=16, seed=0):
    """Return queries and a cache with shuffled blocks, NaN outside the requests' keys and values."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = model
    blocks_of = [-(-context // block_size) for _, context in lengths]
    free = torch.randperm(sum(blocks_of) + 2, generator=generator).tolist()
    tables = torch.zeros((len(lengths), max(blocks_of) + 1), dtype=torch.int32)
    caches = [torch.full((len(free), num_kv_heads, block_size, head_dim), float("nan")) for _ in "kv"]
    for i, (_, context) in enumerate(lengths):
        for j in range(blocks_of[i]):
            tables[i, j] = free.pop()
            rows = min(block_size, context - j * block_size)
            for cache in caches:
                cache[tables[i, j], :, :rows] = torch.randn(num_kv_heads, rows, head_dim, generator=generator)
    starts = [0, *accumulate(query for query, _ in lengths)]
    q = torch.randn(starts[-1], num_heads, head_dim, generator=generator)
    return (
        q.to(device, dtype),
        *(cache.to(device, dtype) for cache in caches),
        tables.to(device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        head_dim**-0.5,
    )


def quantize(k, v, dtype):
    """Return 8-bit caches and their scales; NaN outside the keys and values stays unread."""
    k, k_scales = reference.quantize_rows(k.nan_to_num(), dtype)
    v, v_scales = reference.quantize_rows(v.nan_to_num(), dtype)
    for scales in (k_scales, v_scales):
        scales[scales < 1e-15] = float("nan")
    return k, k_scales, v, v_scales


def poison(monkeypatch):
    """Fill every buffer that the kernels allocate with NaN or a useless index, so that an unwritten element shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 2**30)

    monkeypatch.setattr(module.torch, "empty", poisoned)


def as_bytes(arguments):
    """Return the bytes of each tensor, because NaN differs from itself."""
    return [a.contiguous().view(torch.uint8).clone() for a in arguments if isinstance(a, torch.Tensor)]


def check(arguments, sliding_window=0):
    before = as_bytes(arguments)
    expected = reference.paged_attention(*arguments, sliding_window)
    got = paged_attention(*arguments, sliding_window)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])
    assert all(map(torch.equal, before, as_bytes(arguments)))
    if got.is_cuda:  # the interpreter runs one program after the other
        assert torch.equal(got, paged_attention(*arguments, sliding_window))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("SmolLM2", torch.float32),
        repeated("SmolLM2", torch.float16),
        ("Llama-3.1-8B", torch.float16),
        ("Qwen3", torch.float32),
    ],
)
def test_models_and_batches(model, batch, dtype, device, monkeypatch):
    num_heads, num_kv_heads, head_dim = MODELS[model]
    # The path depends on heads for each KV head and on the dimension; the interpreter takes long for each KV head.
    few = num_kv_heads if device.type == "cuda" else min(num_kv_heads, 2)
    arguments = make((num_heads // num_kv_heads * few, few, head_dim), BATCHES[batch], dtype, device)
    poison(monkeypatch)
    check(arguments)


@pytest.mark.parametrize("window", [1, 24, 300])
@pytest.mark.parametrize("batch", ["decode", "mixed", "chunked prefill"])
def test_sliding_window(batch, window, device, monkeypatch):
    arguments = make((4, 2, 64), BATCHES[batch], torch.float32, device)
    poison(monkeypatch)
    check(arguments, window)


@pytest.mark.parametrize("dtype", [torch.float32, repeated(torch.float16)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.7), (24, 0.7), (24, 50.0)])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_soft_capped_scores(batch, window, softcap, dtype, device, monkeypatch):
    """Gemma 2's soft cap matches the reference, with and without a window; 0.7 is low enough to change the result."""
    arguments = make((4, 2, 64), BATCHES[batch], dtype, device)
    expected = reference.paged_attention(*arguments, window, softcap=softcap)
    poison(monkeypatch)
    got = paged_attention(*arguments, window, softcap=softcap)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if softcap < 1:
        assert (got - paged_attention(*arguments, window)).abs().max() > 0.05


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_soft_capped_scores_of_8_bit_keys(kv_dtype, device, monkeypatch):
    """The cap applies to scores after multiplication by the keys' scales, also if the keys are split among programs."""
    q, k, v, *rest = make((8, 2, 128), [(1, 1500), (1, 300)], torch.float16, device, 32)
    k, k_scales, v, v_scales = quantize(k, v, kv_dtype)
    options = {"k_scales": k_scales, "v_scales": v_scales, "softcap": 0.7}
    expected = reference.paged_attention(q, k, v, *rest, **options)
    poison(monkeypatch)
    got = paged_attention(q, k, v, *rest, **options)
    torch.testing.assert_close(got, expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (32, 1000)])
def test_long_context_is_cut(block_size, window, device, monkeypatch):
    arguments = make((4, 1, 128), [(1, 8192), (1, 900), (1, 100)], torch.float16, device, block_size)
    poison(monkeypatch)
    check(arguments, window)


@pytest.mark.parametrize("programs_per_sm", [1, pytest.param(3, marks=pytest.mark.slow), 11])
def test_any_division_of_the_work(programs_per_sm, device, monkeypatch):
    """Shares that end within a tile, at its end, or hold many tiles, and programs without work give one result."""
    lengths = [(1, 700), (4, 130), (0, 0), (40, 300), (1, 1), (9, 9), (1, 128)]
    arguments = make((8, 2, 32), lengths, torch.float32, device)
    poison(monkeypatch)
    sizes = {
        "decode": replace(DECODE, programs_per_sm=programs_per_sm),
        "prefill": replace(PREFILL, programs_per_sm=programs_per_sm, chunk=64),
    }
    tokens = sum(queries for queries, _ in lengths)
    for window in (0, 100):
        work = list_work(*arguments[4:6], 8, 2, num_tokens=tokens, max_query_len=tokens, sliding_window=window, **sizes)
        got = paged_attention(*arguments, window, work)
        torch.testing.assert_close(got, reference.paged_attention(*arguments, window), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("model", MODELS)
def test_chunks_and_decodes_at_a_context_of_8192(model, block_size, device, monkeypatch):
    arguments = make(MODELS[model], [(40, 8192), (1, 8192), (1, 5000)], torch.float16, device, block_size)
    poison(monkeypatch)
    check(arguments)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_caches_of_8_bits(batch, kv_dtype, device, monkeypatch):
    q, k, v, *rest = make(MODELS["SmolLM2"], BATCHES[batch], torch.float16, device)
    k, k_scales, v, v_scales = quantize(k, v, kv_dtype)
    expected = reference.paged_attention(q, k, v, *rest, k_scales=k_scales, v_scales=v_scales)
    poison(monkeypatch)
    got = paged_attention(q, k, v, *rest, k_scales=k_scales, v_scales=v_scales)
    torch.testing.assert_close(got, expected, atol=4e-3, rtol=4e-3)
    if got.is_cuda:
        assert torch.equal(got, paged_attention(q, k, v, *rest, k_scales=k_scales, v_scales=v_scales))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_long_contexts_of_8_bits_are_cut(kv_dtype, device, monkeypatch):
    q, k, v, *rest = make((8, 2, 128), [(1, 2000), (1, 700)], torch.float16, device, 32)
    full = reference.paged_attention(q, k, v, *rest, 1000)
    k, k_scales, v, v_scales = quantize(k, v, kv_dtype)
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    poison(monkeypatch)
    got = paged_attention(q, k, v, *rest, 1000, **scales)
    torch.testing.assert_close(got, reference.paged_attention(q, k, v, *rest, 1000, **scales), atol=4e-3, rtol=4e-3)
    # The loss of 8 bits against 16: e4m3 keeps three bits behind the point, int8 seven of the row's largest.
    assert (got - full).float().norm() / full.float().norm() < (0.06 if kv_dtype == torch.float8_e4m3fn else 0.02)


@pytest.mark.parametrize("model", [(6, 6, 80), (12, 1, 32), (34, 1, 16), (4, 2, 256)])
def test_other_heads(model, device, monkeypatch):
    """Padded head sizes, no grouping, and groups wider than the smallest tile give the reference's results."""
    arguments = make(model, [(1, 50), (7, 20)], torch.float32, device)
    poison(monkeypatch)
    check(arguments)
    check(make(model, [(1, 50), (1, 3)], torch.float32, device))


def test_queries_may_be_a_view_of_qkv(device):
    q, *rest = make((4, 2, 64), [(1, 20), (6, 6)], torch.float32, device)
    qkv = torch.full((len(q), 8 * 64), float("nan"), device=device)
    qkv[:, :256] = q.flatten(1)
    view = qkv[:, :256].view(-1, 4, 64)
    assert torch.equal(paged_attention(view, *rest), paged_attention(q, *rest))


def test_padding_rows_and_requests_are_left_alone(device, monkeypatch):
    """A graph's bucket is larger than the batch: unused requests have no queries, and unused rows have no owner."""
    q, k, v, tables, starts, contexts, scale = make((4, 2, 64), [(1, 20), (1, 6)], torch.float32, device)
    expected = reference.paged_attention(q, k, v, tables, starts, contexts, scale)
    padded = torch.cat((q, torch.full((2, 4, 64), float("nan"), device=device)))
    starts = torch.cat((starts, starts[-1:], starts[-1:]))
    tables, contexts = torch.cat((tables, tables)), torch.cat((contexts, torch.zeros_like(contexts)))
    poison(monkeypatch)
    got = paged_attention(padded, k, v, tables, starts, contexts, scale)
    torch.testing.assert_close(got[:2], expected, atol=1e-5, rtol=1e-5)
    assert got[2:].isnan().all()


def test_no_tokens(device):
    q, k, v, tables, starts, contexts, scale = make((4, 2, 64), [(1, 20)], torch.float32, device)
    assert paged_attention(q[:0], k, v, tables[:0], starts[:1], contexts[:0], scale).shape == (0, 4, 64)


@pytest.mark.parametrize("break_it", ["dtype", "head", "block", "heads", "scales"])
def test_bad_arguments_are_named(break_it, device):
    q, k, v, *rest = make((4, 2, 64), [(1, 20)], torch.float32, device)
    if break_it == "dtype":
        k = k.half()
    if break_it == "head":
        q = q[..., :32]
    if break_it == "block":
        k, v = k[:, :, :12].contiguous(), v[:, :, :12].contiguous()
    if break_it == "heads":
        q = q[:, :3]
    if break_it == "scales":
        k, v = k.to(torch.int8), v.to(torch.int8)
    with pytest.raises(ValueError, match=r"^(k_cache|num_heads|k_scales): "):
        paged_attention(q, k, v, *rest)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [*BATCHES, "long"])
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16(model, batch, device, monkeypatch):
    lengths = [(1, 8192), (1, 5000), (300, 4000)] if batch == "long" else BATCHES[batch]
    arguments = make(MODELS[model], lengths, torch.bfloat16, device, 32)
    poison(monkeypatch)
    check(arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("batch", [*BATCHES, "long"])
def test_bfloat16_over_caches_of_8_bits(batch, kv_dtype, device, monkeypatch):
    lengths = [(1, 8192), (1, 5000), (300, 4000)] if batch == "long" else BATCHES[batch]
    q, k, v, *rest = make(MODELS["Llama-3.1-8B"], lengths, torch.bfloat16, device, 16)
    k, k_scales, v, v_scales = quantize(k, v, kv_dtype)
    expected = reference.paged_attention(q, k, v, *rest, k_scales=k_scales, v_scales=v_scales)
    poison(monkeypatch)
    got = paged_attention(q, k, v, *rest, k_scales=k_scales, v_scales=v_scales)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
