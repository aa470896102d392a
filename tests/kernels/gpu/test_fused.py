"""The element-wise Triton kernels against `kernels.reference`, element by element."""

import pytest
import torch

from kernels import reference
from kernels.gpu import fused

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WIDTHS = [576, 4096, 100]


def close(got, expected):
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def randn(*shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill outputs with NaN, so that an unwritten element shows."""
    empty = torch.empty
    monkeypatch.setattr(fused.torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width, dtype, device):
    x, weight = randn(5, width, dtype=dtype, device=device), randn(width, dtype=dtype, device=device, seed=1)
    close(fused.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    # Gemma's weights are in fp32 and multiply before the result is rounded.
    found = fused.rms_norm(x, weight.float(), 1e-5)
    close(found, reference.rms_norm(x, weight.float(), 1e-5))
    assert found.dtype == dtype
    if dtype != torch.float32:
        once = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()).to(dtype)
        assert (found != once).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_a_qkv_row(dtype, device):
    qkv, weight = randn(3, 10 * 64, dtype=dtype, device=device), randn(64, dtype=dtype, device=device, seed=1)
    heads = qkv[:, 64 : 7 * 64].view(3, 6, 64)
    close(fused.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


def test_rms_norm_of_large_fp16_values(device):
    """rms_norm is correct for values whose squares exceed fp16's range."""
    x = randn(2, 64, dtype=torch.float16, device=device) * 2000
    close(fused.rms_norm(x, torch.ones_like(x[0]), 1e-5), reference.rms_norm(x, torch.ones_like(x[0]), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(width, dtype, device):
    x, residual = randn(5, width, dtype=dtype, device=device), randn(5, width, dtype=dtype, device=device, seed=1)
    weight, expected_residual = randn(width, dtype=dtype, device=device, seed=2), residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    close(fused.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (3, 1, 80)], ids=["SmolLM2", "Llama-3.1-8B", "padded"])
def test_rope_and_write_kv(heads, block_size, dtype, device):
    num_heads, num_kv_heads, head_dim = heads
    qkv = randn(6, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.tensor([0, 3, 99, 1, 40, 7], device=device)
    angles = torch.rand(100, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
    slots = torch.tensor([0, 3 * block_size + 5, 17, 2 * block_size - 1, 70, 33], device=device)
    caches = [randn(5, num_kv_heads, block_size, head_dim, dtype=dtype, device=device, seed=i) for i in (4, 5)]
    expected_caches = [cache.clone() for cache in caches]
    expected = reference.rope_and_write_kv(qkv, positions, cos_sin, *expected_caches, slots)
    close(fused.rope_and_write_kv(qkv, positions, cos_sin, *caches, slots), expected)
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        close(cache, expected_cache)
    assert torch.equal(caches[1], expected_caches[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 8, 128), (3, 1, 80)], ids=["Qwen3", "padded"])
def test_heads_are_normalised_before_the_rotation(heads, dtype, device):
    num_heads, num_kv_heads, head_dim = heads
    qkv = randn(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device) * 3
    positions = slots = torch.tensor([0, 3, 9, 1], device=device)
    angles = torch.rand(10, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
    weights = [randn(head_dim, dtype=dtype, device=device, seed=i) + 1 for i in (6, 7)]
    # Weights in fp32, as Gemma's, multiply before the result is rounded.
    for norms in (reference.HeadNorms(*weights, 1e-6), reference.HeadNorms(*(w.float() for w in weights), 1e-6)):
        shape = (1, num_kv_heads, 16, head_dim)
        caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"]
        expected_caches = [cache.clone() for cache in caches]
        expected = reference.rope_and_write_kv(qkv, positions, cos_sin, *expected_caches, slots, norms=norms)
        close(fused.rope_and_write_kv(qkv, positions, cos_sin, *caches, slots, norms=norms), expected)
        close(caches[0], expected_caches[0])
        assert torch.equal(caches[1], expected_caches[1])


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (3, 1, 80)], ids=["SmolLM2", "Llama-3.1-8B", "padded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_writes_caches_of_8_bits(dtype, heads, kv_dtype, device):
    num_heads, num_kv_heads, head_dim = heads
    qkv = randn(5, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
    qkv[3] = 0
    positions, slots = torch.arange(5, device=device), torch.tensor([40, 3, -1, 17, 25], device=device)
    angles = torch.rand(9, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
    shape = (3, num_kv_heads, 16, head_dim)
    caches = [torch.full(shape, 7.0, device=device).to(kv_dtype) for _ in "kv"]
    scales = [torch.full(shape[:3], 3.0, device=device) for _ in "kv"]
    expected_caches, expected_scales = [c.clone() for c in caches], [s.clone() for s in scales]
    expected = reference.rope_and_write_kv(qkv, positions, cos_sin, *expected_caches, slots, *expected_scales)
    close(fused.rope_and_write_kv(qkv, positions, cos_sin, *caches, slots, *scales), expected)
    for cache, scale, expected_cache, expected_scale in zip(
        caches, scales, expected_caches, expected_scales, strict=True
    ):
        torch.testing.assert_close(scale, expected_scale, atol=0, rtol=1e-3)
        # Values that round differently are neighbours: 32 of 448 apart, or 1 of 127.
        step = 32 if kv_dtype == torch.float8_e4m3fn else 1
        apart = (cache.float() - expected_cache.float()).abs()
        assert apart.max() <= step
        assert (apart > 0).float().mean() < 0.01


def test_padding_tokens_store_nothing(device):
    qkv = randn(2, 3 * 64, dtype=torch.float32, device=device)
    caches = [randn(2, 1, 16, 64, dtype=torch.float32, device=device, seed=i) for i in (1, 2)]
    before = [cache.clone() for cache in caches]
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    fused.rope_and_write_kv(qkv, zeros, torch.ones(4, 64, device=device), *caches, zeros - 1)
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 100])
def test_gates(width, dtype, device):
    gate_up = randn(4, 2 * width, dtype=dtype, device=device) * 4
    close(fused.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    close(fused.gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up))


def test_no_tokens(device):
    nothing = torch.zeros(0, 64, device=device)
    weight, cache = torch.ones(64, device=device), torch.zeros(1, 1, 16, 64, device=device)
    index = torch.zeros(0, dtype=torch.int64, device=device)
    assert fused.rms_norm(nothing, weight, 1e-5).shape == (0, 64)
    assert fused.add_rms_norm(nothing, nothing.clone(), weight, 1e-5).shape == (0, 64)
    assert fused.silu_and_mul(nothing).shape == (0, 32)
    qkv = torch.zeros(0, 192, device=device)
    assert fused.rope_and_write_kv(qkv, index, weight[None], cache, cache.clone(), index).shape == (0, 1, 64)


def test_bad_arguments_are_named(device):
    x, weight = torch.zeros(2, 64, device=device), torch.ones(64, device=device)
    cache, index = torch.zeros(1, 1, 16, 64, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^weight: "):
        fused.rms_norm(x, weight[:32], 1e-5)
    with pytest.raises(ValueError, match=r"^weight: .* of torch.float32 or float32, got .* of torch.float16"):
        fused.rms_norm(x, weight.half(), 1e-5)
    with pytest.raises(ValueError, match=r"^residual: "):
        fused.add_rms_norm(x, x[:1], weight, 1e-5)
    with pytest.raises(ValueError, match=r"^x: "):
        fused.rms_norm(x.T, weight[:2], 1e-5)
    with pytest.raises(ValueError, match=r"^gate_up: "):
        fused.silu_and_mul(x[:, :63])
    with pytest.raises(ValueError, match=r"^qkv: "):
        fused.rope_and_write_kv(x, index, weight[None], cache, cache, index)
    with pytest.raises(ValueError, match=r"^cos_sin: "):
        fused.rope_and_write_kv(x.repeat(1, 3), index, weight[None, :32], cache, cache, index)
    with pytest.raises(ValueError, match=r"^k_scales: "):
        fused.rope_and_write_kv(x.repeat(1, 3), index, weight[None], cache, cache, index, x, x)
